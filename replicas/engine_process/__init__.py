"""An engine in a process of its own: both sides of the pipe.

With `engine_process` a child process builds the engine, whichever it is. During start the child answers
calls of the Engine protocol over a pipe, one question and one answer each, so that the start-up proof tests
what crosses it. Then the child runs the engine loop itself: submits and aborts go in, one frame per step
comes out, and no step waits for the parent. Records cross the pipe in msgpack.

The child ignores SIGINT and SIGTERM (the replica drains), ends when the pipe closes, and is killed if a
step exceeds its deadline.
"""
