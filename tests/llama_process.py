"""`python llama_process.py GGUF PORT SLOTS THREADS`: llama.cpp's server, until standard input ends."""

import sys

import xllamacpp

CONTEXT_LENGTH = 4096
"""Of each slot."""


def serve(model: str, port: str, num_slots: str, num_threads: str) -> None:
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.model_alias, settings.port = model, {"toy", "toy-too"}, int(port)
    settings.n_parallel, settings.n_ctx = int(num_slots), int(num_slots) * CONTEXT_LENGTH
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.n_threads_http = int(num_threads)
    settings.endpoint_metrics = settings.endpoint_slots = True
    settings.warmup = settings.ui = False
    server = xllamacpp.Server(settings)
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdin.read()


if __name__ == "__main__":
    serve(*sys.argv[1:])
