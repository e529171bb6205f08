"""A model behind HTTP, in the form of OpenAI's completions.

`protocol` and `answers` are pure functions of their arguments, `worker` is the thread that uses the
device, and `app` and `server` are the front end, which needs starlette and uvicorn.
"""
