"""`python -m transformers_neuronx`, and the command `transformers-neuronx`."""

import signal
import sys


def main() -> None:
    """Run the command line. Ctrl-C while it is being imported ends it as later on."""
    try:
        from transformers_neuronx import cli

        cli.main()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    finally:  # threads that compile are waited for: a second Ctrl-C is not
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
