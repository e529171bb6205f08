"""An HTTP server for a model, compatible with OpenAI's completions API.

`protocol` parses requests and `answers` formats responses; neither module reads or writes anything
itself. `worker` is the thread that uses the device. `app` and `server` are the HTTP front end and
need starlette and uvicorn.
"""
