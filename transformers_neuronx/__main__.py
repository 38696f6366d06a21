"""`python -m transformers_neuronx`, and the command `transformers-neuronx`."""

import signal
import sys


def main() -> None:
    """Run the command line. Ctrl-C also ends it during the imports."""
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
