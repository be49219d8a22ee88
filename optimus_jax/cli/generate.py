"""`optimus generate`: generate text with the model of a run, or a published one.

`optimus generate --run runs/NAME --prompt "def main("`
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from optimus_jax.cli.model_flags import MODEL_WORDS, add_model_flags, loaded
from optimus_jax.config.settings import shown
from optimus_jax.data.record_names import MESSAGES, PROMPT, ROLE, TOOLS, USER
from optimus_jax.errors import ConfigError, explain
from optimus_jax.run.command_line import Parser
from optimus_jax.system.environment import import_jax
from optimus_jax.system.paths import local_path
from optimus_jax.system.resilient_io import print_to_stderr

if TYPE_CHECKING:
    from optimus_jax.inference.chats import GivenPrompt

STANDARD_INPUT = "-"
BATCH_SIZE = 8
"""Default of --batch-size."""
WORDS = MODEL_WORDS | {
    "run": f"{MODEL_WORDS['run']} out_dir",
    "prompt": "prompt_text input_text",
    "max_new_tokens": "max_tokens max_gen_len max_generated_tokens num_tokens length",
    "temperature": "temp",
    "num_samples": "num_return_sequences n_samples",
    "top_k": "topk",
    "top_p": "topp",
    "chat_template": "template",
}
"""Aliases: what other programs call these flags."""
FLAGS = {
    "--set data.chat_template=": "--chat-template ",
    "data.chat_template": "--chat-template",
    "--set data.eos=": "--eos ",
}
"""Settings of a run, as error messages name them -> the same as flags of this command."""


def parser() -> Parser:
    """The parser of this command's flags."""
    flags = Parser(
        description="Generate text with a model: it continues a prompt.",
        words=WORDS,
        settings=FLAGS,
    )
    add_model_flags(flags)
    prompt = flags.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "--prompt", metavar="TEXT", help="text to continue; printed before the generated text"
    )
    prompt.add_argument(
        "--prompt-file", metavar="FILE", help="file with the text to continue; -: standard input"
    )
    prompt.add_argument(
        "--prompts",
        metavar="FILE",
        help="JSON Lines, each a text or an object with `prompt`, or with --chat `messages` and"
        " `tools`; -: standard input. Each object is printed with `text`, or `texts` of several"
        " samples",
    )
    flags.add_argument(
        "--batch-size",
        metavar="N",
        type=int,
        help=f"with --prompts: most prompts to continue at once (default: {BATCH_SIZE})",
    )
    flags.add_argument(
        "--chat",
        action="store_true",
        help="answer the prompt as a user's message, or a conversation, by the chat template"
        " (default: continue it)",
    )
    flags.add_argument(
        "--chat-template",
        metavar="FILE",
        help="with --chat: file or URL of another template (default: the tokenizer's own)",
    )
    flags.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="end a text before this one; may be given several times (default: none)",
    )
    flags.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=int,
        default=200,
        help="most tokens to generate (default: %(default)s)",
    )
    flags.add_argument(
        "--temperature",
        metavar="X",
        type=float,
        default=1.0,
        help="divides the logits; 0: always the likeliest token (default: %(default)s)",
    )
    flags.add_argument(
        "--top-k", metavar="N", type=int, help="sample from the N likeliest tokens (default: all)"
    )
    flags.add_argument(
        "--top-p",
        metavar="X",
        type=float,
        default=1.0,
        help="sample from the likeliest tokens up to this total probability (default: %(default)s)",
    )
    flags.add_argument(
        "--seed",
        metavar="N",
        type=int,
        default=0,
        help="seed of the sampling (default: %(default)s)",
    )
    flags.add_argument(
        "--num-samples",
        metavar="N",
        type=int,
        default=1,
        help="texts to generate at once (default: %(default)s)",
    )
    flags.add_argument(
        "--past-trained-length",
        action="store_true",
        help=(
            "allow more tokens than the longest sequence of training; learned positions beyond it"
            " are noise (default: stop there)"
        ),
    )
    return flags


def read_prompt(name: str, flag: str = "--prompt-file") -> str:
    """The text of a file, or of standard input, without a final newline.

    Raises ConfigError if it cannot be read.
    """
    try:
        content = (
            sys.stdin.buffer.read()
            if name == STANDARD_INPUT
            else local_path(name, what=flag).read_bytes()
        )
        return content.decode().removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            explain(
                "the prompt cannot be read",
                given=f"{flag} {name}: {error}",
                do="give a text file in UTF-8, or - for standard input",
            )
        ) from error


def read_prompts(name: str, *, chat: bool) -> "list[tuple[dict[str, Any], GivenPrompt]]":
    """The objects of a JSON Lines file, or of standard input, each with its prompt.

    Args:
      chat: whether a line may have the messages of a conversation, and its tools.
    Raises:
      ConfigError: it cannot be read, a line holds no prompt, or there is none.
    """
    prompts = []
    text = read_prompt(name, "--prompts").removeprefix("\ufeff")
    for number, line in enumerate(text.split("\n"), 1):  # JSON texts may hold other line breaks
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        record = value if isinstance(value, dict) else {PROMPT: value}
        found = record.get(PROMPT)
        if not found and isinstance(record.get(MESSAGES), list):
            found = record[MESSAGES]
        if isinstance(found, list) and found and not chat:
            raise ConfigError(
                explain(
                    f"line {number} is a conversation, and prompts are texts to continue",
                    given=f"--prompts {name}: {shown(line)}",
                    do="add --chat, to answer it by the chat template",
                )
            )
        if not isinstance(found, str | list) or not found:
            raise ConfigError(
                explain(
                    f"line {number} holds no prompt",
                    given=f"--prompts {name}: {shown(line)}",
                    do='write a JSON text, or an object such as {"prompt": "Once"}, on each line',
                )
            )
        if chat and record.get(TOOLS):
            messages = [{ROLE: USER, "content": found}] if isinstance(found, str) else found
            found = {MESSAGES: messages, TOOLS: record[TOOLS]}
        prompts.append((record, found))
    if not prompts:
        raise ConfigError(
            explain(
                "there is no prompt",
                given=f"--prompts {name}, without a line that is not blank",
                do='write a JSON text, or an object such as {"prompt": "Once"}, on each line',
            )
        )
    return prompts


def show(prompt: str, pieces: Iterator[list[str]]) -> None:
    """Print the first sample while it is generated, and the other samples afterwards."""
    print(prompt, end="", flush=True)
    others = []
    for first, *rest in pieces:
        print(first, end="", flush=sys.stdout.isatty())
        others.append(rest)
    print()
    for texts in zip(*others, strict=True):
        print("", "-" * 40, prompt + "".join(texts), sep="\n")


def main() -> None:
    flags = parser()
    given = flags.read()
    if given["chat_template"] is not None and not given["chat"]:
        raise ConfigError(
            explain(
                "a chat template writes out messages, and the prompt is a text",
                given=f"--chat-template {given['chat_template']} without --chat",
                do="add --chat, or leave it out",
            )
        )
    if given["batch_size"] is not None and given["prompts"] is None:
        raise ConfigError(
            explain(
                "a single prompt is no batch",
                given=f"--batch-size {given['batch_size']} without --prompts",
                do="leave it out; --num-samples N gives several texts of one prompt",
            )
        )
    import_jax()  # after parsing, so that --help does not wait for JAX
    from rich.console import Console
    from rich.progress import Progress

    from optimus_jax.inference.text_model import GenerationSettings

    prompt, prompts = given["prompt"], []
    if given["prompts"] is not None:
        prompts = read_prompts(given["prompts"], chat=given["chat"])
    elif prompt is None:
        prompt = read_prompt(given["prompt_file"])
    with flags.own_words():
        how = GenerationSettings(
            **{each.name: given[each.name] for each in fields(GenerationSettings)}
        )
        model = loaded(given, chat_template=given["chat_template"]).text_model
        step = "" if model.step is None else f" after step {model.step}"
        told = f"{model.config.name}{step}"
        if given["prompts"] is None:
            pieces = model.generate(prompt, how, warn=print_to_stderr)
            print_to_stderr(told)
            show("" if given["chat"] else prompt, pieces)
            return
        size = BATCH_SIZE if given["batch_size"] is None else given["batch_size"]
        asked = [prompt for _, prompt in prompts]
        texts = model.generate_each(asked, how, batch_size=size, warn=print_to_stderr)
        print_to_stderr(told)
        shown = Progress(
            console=Console(stderr=True),
            disable=sys.stdout.isatty() or not sys.stderr.isatty(),
            transient=True,
            redirect_stdout=False,  # texts go where the user sends them
        )
        with shown:
            for (record, _), of_samples in shown.track(
                zip(prompts, texts, strict=True), total=len(prompts), description="Generating"
            ):
                show_json(record, of_samples)


def show_json(asked: dict[str, Any], texts: Sequence[str]) -> None:
    """Print a line of the prompts with the text of its sample, or the texts of several."""
    of_samples = {"text": texts[0]} if len(texts) == 1 else {"texts": texts}
    print(json.dumps(asked | of_samples, ensure_ascii=False), flush=True)
