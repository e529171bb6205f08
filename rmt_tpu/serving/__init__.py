"""An HTTP server for a model, compatible with OpenAI's completions and chats.

`protocol`, `chat` and `tokens` parse requests with the checks of `fields`, and `answers` formats
responses; these modules read and write nothing themselves. `worker` is the thread that uses the
device, and `metrics` counts what it does. `app` and `server` are the HTTP front end and need
starlette and uvicorn.
"""
