"""From nothing to a model that answers: pre-trained on Python's library, exported, imported again,
and tuned with LoRA on generated conversations until it answers in the format asked for.
"""

import json

import pytest

import optimus_jax
from optimus_jax.inference.loading import load_text_model

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES = {
    "model.num_layers": 2,
    "model.embed_dim": 64,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 16,
    "model.mlp_dim": 256,
    "model.max_length": 128,
}
COMMON = {"global_batch": 16, "seq_len": 128, "progress": "none", "eval_every": 0, "lr": 4e-3}
HELD_OUT = range(3, 1000, 25)
"""Numbers that are asked for, and not trained on."""


def question(number: int) -> str:
    return f"Is {number:03} even or odd? Answer in brackets."


def answer(number: int) -> str:
    return "[even]" if number % 2 == 0 else "[odd]"


def accuracy(directory) -> float:
    """Share of the held-out questions that are answered exactly."""
    model = load_text_model(directory)
    right = 0
    for number in HELD_OUT:
        pieces = model.generate(
            question(number), chat=True, temperature=0, max_new_tokens=12, warn=lambda text: None
        )
        right += "".join(first for (first,) in pieces) == answer(number)
    return right / len(HELD_OUT)


@pytest.mark.slow
def test_a_model_learns_to_answer_in_the_format_asked_for(tmp_path):
    template, chats = tmp_path / "chat.jinja", tmp_path / "chats.jsonl"
    template.write_text(TEMPLATE)
    chats.write_text(
        "".join(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": question(number)},
                        {"role": "assistant", "content": answer(number)},
                    ]
                }
            )
            + "\n"
            for number in set(range(1000)) - set(HELD_OUT)
        )
    )
    written = {"data.chat_template": str(template)}
    optimus_jax.train(
        "llama-nano",
        mesh="data=2,tensor=2,pipe=2",
        steps=40,
        run_dir=tmp_path / "base",
        **COMMON,
        **SIZES,
        **written,
    )
    optimus_jax.export(tmp_path / "base", tmp_path / "exported")
    optimus_jax.train(
        str(tmp_path / "exported"),
        data=str(chats),
        mesh="fsdp=4,tensor=2",
        steps=150,
        run_dir=tmp_path / "tuned",
        **{
            **COMMON,
            **written,
            "data.eval_fraction": 0.0,
            "model.tuning.method": "lora",
            "model.tuning.freeze": "embedding",
        },
    )
    optimus_jax.export(tmp_path / "tuned", tmp_path / "published")
    before, after = (accuracy(tmp_path / name) for name in ("exported", "published"))
    print(f"held-out accuracy: {before:.0%} before, {after:.0%} after")
    assert before == 0
    assert after >= 0.9
