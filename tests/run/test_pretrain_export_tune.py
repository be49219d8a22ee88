"""From nothing to a model that answers: trained on Python's library, exported, begun with again,
and tuned with LoRA on conversations until it answers in the format asked for.

It takes half a minute, because a model must learn twice. By day, each link is tried alone:
test_export.py, test_published_weights.py, test_tuning_data.py and test_generation.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import optimus_jax
from optimus_jax.inference.loading import load_text_model
from optimus_jax.inference.text_model import GenerationSettings

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Ends what the assistant says with a token: a model that never sees one does not stop talking."""
SIZES = {
    "model.num_layers": 2,
    "model.embed_dim": 64,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 16,
    "model.mlp_dim": 256,
    "model.max_length": 128,
}
COMMON: dict[str, Any] = {
    "global_batch": 16,
    "seq_len": 128,
    "progress": "none",
    "eval_every": 0,
}
TUNING: dict[str, Any] = {
    "lr": 1e-2,
    "model.tuning.method": "lora",
    # Norms and head are trained: those of a model that has seen so little can hardly be adapted.
    "model.tuning.freeze": "embedding,attention,mlp",
}
HELD_OUT = range(3, 1000, 25)
"""Numbers of the questions that are not trained on: 20 of either kind."""
LEAST_ACCURACY = 0.9
"""Four seeds reach 1; one who always gives the same answer, 0.5."""
LETTERS = str.maketrans("0123456789", "abcdefghij")


def conversation(number: int) -> dict[str, str]:
    """What each role says."""
    is_word, digits = number % 2 == 0, f"{number:03}"
    return {
        "user": f"Word or number: {digits.translate(LETTERS) if is_word else digits}",
        "assistant": "[word]" if is_word else "[number]",
    }


def answers(directory: Path) -> list[str]:
    """What the model of a run, or a published one, says to the held-out questions."""
    model = load_text_model(directory)
    said = []
    for number in HELD_OUT:
        how = GenerationSettings(chat=True, temperature=0, max_new_tokens=12)
        pieces = model.generate(conversation(number)["user"], how)
        said.append("".join(text for (text,) in pieces))
    return said


def accuracy(said: list[str]) -> float:
    """Share of the held-out questions that are answered exactly, with nothing after the answer."""
    right = [conversation(number)["assistant"] for number in HELD_OUT]
    return sum(map(str.__eq__, said, right)) / len(right)


@pytest.mark.nightly
def test_a_model_learns_to_answer_in_the_format_asked_for(tmp_path: Path):
    template, chats = tmp_path / "chat.jinja", tmp_path / "chats.jsonl"
    template.write_text(TEMPLATE)
    with chats.open("w") as file:
        for number in sorted({*range(1000)} - {*HELD_OUT}):
            said = conversation(number).items()
            messages = [{"role": role, "content": content} for role, content in said]
            print(json.dumps({"messages": messages}), file=file)
    with_template = {"data.chat_template": str(template)}
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    optimus_jax.train(
        "llama-nano",
        mesh="data=2,tensor=2,pipe=2",
        steps=40,
        lr=4e-3,
        run_dir=base,
        **COMMON,
        **SIZES,
        **with_template,
    )
    base_model = optimus_jax.export(base, tmp_path / "base-model").directory
    optimus_jax.train(
        str(base_model),
        data=str(chats),
        mesh="fsdp=4,tensor=2",
        steps=80,
        run_dir=tuned,
        **COMMON,
        **TUNING,
        **{"data.eval_fraction": 0.0},
    )
    tuned_model = optimus_jax.export(tuned, tmp_path / "tuned-model").directory
    before, after, exported = map(answers, (base_model, tuned, tuned_model))
    print(f"held-out accuracy: {accuracy(before):.0%} before, {accuracy(after):.0%} after")
    assert accuracy(before) == 0
    assert accuracy(after) >= LEAST_ACCURACY
    assert exported == after
