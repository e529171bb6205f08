"""An HTTP server for a model, compatible with OpenAI's completions API.

`protocol` (the parsing of requests) and `answers` (the formatting of responses) do no input or
output of their own. `worker` is the thread that uses the device. `app` and `server` are the HTTP
front end and need starlette and uvicorn.
"""
