"""Go on with a text by a trained model. `python scripts/generate.py --run runs/NAME --prompt "def main("`"""

import os
import sys

# Python puts the folder of a script first on the path, and there scripts/tokenize.py would take the
# place of the standard module `tokenize`, which inspect and linecache import, and jax with them.
if (folder := os.path.dirname(os.path.realpath(__file__))) in sys.path:
    sys.path.remove(folder)

import argparse
from collections.abc import Iterator

from optimus_jax.environment import import_jax, show_every_character
from optimus_jax.errors import OptimusError

USER_ERROR = 2
INTERRUPTED = 130
NO_READER = 141
"""What a shell has for a program that ended because nobody read on (128 + SIGPIPE)."""


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        description="Go on with a text by a trained model.", allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=118))
    flags.add_argument("--run", metavar="DIR", required=True, help="directory or URL of a run")
    flags.add_argument("--prompt", metavar="TEXT", required=True, help="what to go on from; printed before what is made")
    flags.add_argument("--max-new-tokens", metavar="N", type=int, default=200, help="most tokens to make (default: %(default)s)")
    flags.add_argument("--temperature", metavar="X", type=float, default=1.0, help="divides the logits; 0: likeliest token (default: %(default)s)")
    flags.add_argument("--top-k", metavar="N", type=int, help="draw from the N likeliest tokens (default: all)")
    flags.add_argument("--top-p", metavar="X", type=float, default=1.0, help="draw from the likeliest of this share (default: %(default)s)")
    flags.add_argument("--seed", metavar="N", type=int, default=0, help="of all draws (default: %(default)s)")
    flags.add_argument("--step", metavar="N", type=int, help="checkpoint to load (default: the newest good one)")
    flags.add_argument("--num-samples", metavar="N", type=int, default=1, help="texts to make, side by side (default: %(default)s)")
    flags.add_argument("--past-trained-length", action="store_true",
                       help="go past the longest text that the model was trained on, though learned positions there are noise")
    return flags


def show(prompt: str, pieces: Iterator[list[str]]) -> None:
    """Print the first sample as it is made, those made beside it afterwards."""
    print(prompt, end="", flush=True)
    others = []
    for first, *rest in pieces:
        print(first, end="", flush=sys.stdout.isatty())
        others.append(rest)
    print()
    for texts in zip(*others, strict=True):
        print("", "-" * 40, prompt + "".join(texts), sep="\n")


def note(text: str) -> None:
    """What is not part of the texts."""
    print(text, file=sys.stderr)


def main() -> int:
    """Exit code: 0 done, 2 the user's error, 130 Ctrl-C, 141 nobody read on."""
    args = parser().parse_args()
    show_every_character()
    try:
        import_jax()
        from optimus_jax.generation import load_text_model  # after parsing: --help need not wait for JAX

        model = load_text_model(args.run, args.step, warn=note)
        pieces = model.generate(args.prompt, max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_k=args.top_k,
                                top_p=args.top_p, seed=args.seed, num_samples=args.num_samples, past_trained_length=args.past_trained_length, warn=note)
        note(f"{model.config.name} after step {model.step}")
        show(args.prompt, pieces)
    except OptimusError as error:
        note(f"error: {error}")
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # as of `| head`: who reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still in the buffer must go somewhere
        return NO_READER
    return 0


if __name__ == "__main__":
    sys.exit(main())
