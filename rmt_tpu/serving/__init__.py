"""An HTTP server for a model, compatible with OpenAI's API for completions and chats.

`protocol`, `chat` and `tokens` parse requests with the checks of `fields`, and `answers` formats
responses; these modules do no input or output. `worker` is the thread that uses the device, and
`metrics` counts what it does. `app` and `server` are the HTTP front end, which needs starlette and
uvicorn.
"""
