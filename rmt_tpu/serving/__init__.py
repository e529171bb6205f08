"""A model behind HTTP, as OpenAI's completions have it.

`protocol` and `answers` are functions of their arguments alone, `worker` is the thread that has the
device, `app` and `server` are the front, which need starlette and uvicorn.
"""
