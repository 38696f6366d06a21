"""`python -m transformers_neuronx`, and the command `transformers-neuronx`."""

import gc
import signal
import sys


def main() -> None:
    """Run the command line. Ctrl-C also ends it during the imports."""
    gc.set_threshold(100_000)  # of all that imports and graphs make, nearly nothing is garbage
    try:
        from transformers_neuronx import cli

        cli.main()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    finally:  # a second Ctrl-C does not wait for threads that compile
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
