"""A step on preference pairs computes the loss, gradients and rewards of TRL's DPOTrainer.

TRL's reference for a new adapter is the model with the adapter disabled, as ours is.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import plans
import pytest
from helpers import relative_error

from optimus_jax.config import Tuning
from optimus_jax.data.pieces import Pieces
from optimus_jax.mesh.axes import LAYERS
from optimus_jax.models.huggingface import config_from_huggingface, from_huggingface
from optimus_jax.models.peft_format import to_peft
from optimus_jax.models.shapes import Params
from optimus_jax.training.step import build_program
from optimus_jax.weights.peft_directory import read_peft, write_peft

torch = pytest.importorskip("torch", reason="the reference: pip install optimus-jax[huggingface]")
trl = pytest.importorskip("trl", reason="the reference: pip install optimus-jax[huggingface]")

RTOL = 1e-4
"""Of a loss, of a reward, and of the largest entry of a gradient. Measured: 2e-7, 6e-7 and 5e-6."""
BETA, SMOOTHING = 0.7, 0.1
SEQ_LEN, NUM_EXAMPLES = 40, 8
SIZES = {"vocab_size": 97}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES
    | {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": SEQ_LEN,
    },
    "gpt2": SIZES | {"n_positions": SEQ_LEN, "n_embd": 32, "n_layer": 2, "n_head": 4},
}
LORA = Tuning(method="lora", rank=3, alpha=5.0)
REWARDS = {
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
    "reward_margin": "rewards/margins",
    "preference_accuracy": "rewards/accuracies",
}
"""Our metrics, and TRL's names of them."""


class Found(NamedTuple):
    """What one of the two computes for the pairs."""

    loss: float
    gradients: dict[str, np.ndarray]
    """By PEFT's names of the adapters' matrices."""
    rewards: dict[str, float]
    """By our names."""


def packed_pairs() -> tuple[dict[str, np.ndarray], list[dict[str, list[int]]]]:
    """A batch of pairs of different lengths, several to an example; and the same pairs for TRL."""
    random, pairs = np.random.Generator(np.random.PCG64(11)), []
    for _ in range(4 * NUM_EXAMPLES):
        lengths = random.integers(1, 9, 3)
        prompt, chosen, rejected = (random.integers(0, 97, length).tolist() for length in lengths)
        pairs.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
    texts = [
        (pair["prompt_ids"], pair[answer])
        for pair in pairs
        for answer in ("chosen_ids", "rejected_ids")
    ]
    data = Pieces(
        name="pairs",
        tokens=np.array([token for text in texts for part in text for token in part], np.uint16),
        counts=np.concatenate(
            [np.repeat([False, True], [len(prompt), len(answer)]) for prompt, answer in texts]
        ),
        starts=np.cumsum([0] + [len(prompt) + len(answer) for prompt, answer in texts]),
        vocab_size=97,
        too_long="drop",
        group_size=2,
    )
    examples = np.arange(NUM_EXAMPLES)
    rows = data.cut_examples(examples, seq_len=SEQ_LEN, respect_documents=True)
    used, packing = data.packing(SEQ_LEN)
    inside = [int(used[piece]) for example in examples for piece in packing[example]]
    assert len(inside) > NUM_EXAMPLES
    return {**rows, "examples": examples.astype(np.int32)}, [pairs[each] for each in inside]


def their_model(family: str) -> Any:
    """A model of transformers whose parameters all differ."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **MODELS[family])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def with_random_adapters(base: Params, like: Params) -> Params:
    """`base` with adapters whose products are not zero."""
    random, found = np.random.Generator(np.random.PCG64(7)), dict(jax.tree.leaves_with_path(base))
    return jax.tree.map_with_path(
        lambda path, leaf: (
            found[path]
            if path in found
            else (0.3 * random.standard_normal(leaf.shape)).astype(np.float32)
        ),
        like,
    )


def ours(
    case: plans.PlanCase, family: str, smoothing: float, folder: Path, rows: dict[str, np.ndarray]
) -> Found:
    """Of a training step under a plan. Its adapters are left in `folder` as PEFT's files."""
    theirs = their_model(family)
    base = config_from_huggingface(theirs.config.to_dict())
    model = replace(base, tuning=LORA, dropout=0.0)
    config = plans.make_config(
        model,
        case,
        {
            "task": "dpo",
            "preference.beta": BETA,
            "preference.label_smoothing": smoothing,
            "data.global_batch": NUM_EXAMPLES,
            "data.seq_len": SEQ_LEN,
            # The first moment is then the gradient.
            "optimizer.beta1": 0.0,
            "optimizer.clip_norm": 0.0,
        },
    )
    plan = plans.make_plan(config)
    program = build_program(config, plan, jax.devices()[: plan.num_devices])
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    like = program.abstract_params(LORA)
    params = with_random_adapters(
        from_huggingface(state, model.base, program.shapes.vocab_rows), like
    )
    write_peft(folder, *to_peft(params, model))
    begin = program.state_with(
        jax.tree.map(lambda leaf, to: jax.device_put(leaf, to.sharding), params, like)
    )
    after, metrics = program.train_step(begin, program.put_batch(rows))
    moments = jax.device_get(after.opt_state[0].mu)
    _, gradients = to_peft({LAYERS: moments[LAYERS]}, model)
    return Found(
        float(metrics["loss"]), gradients, {name: float(metrics[name]) for name in REWARDS}
    )


def tokenizer() -> Any:
    """A tokenizer that TRL's trainer asks for. The pairs are tokens already."""
    import tokenizers
    import transformers

    words = tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="<pad>", eos_token="<eos>"
    )


def trainer_of(family: str, files: Path, folder: Path, **settings: Any) -> Any:
    """TRL's trainer with a new adapter, which then gets the weights in `files`."""
    import datasets
    import peft

    adapter = peft.PeftConfig.from_pretrained(str(files))
    adapter.inference_mode = False
    trainer = trl.DPOTrainer(
        model=their_model(family),
        args=trl.DPOConfig(
            output_dir=str(folder),
            beta=BETA,
            max_length=None,
            bf16=False,
            report_to=[],
            use_cpu=True,
            **settings,
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "", "chosen": "", "rejected": ""}]),
        processing_class=tokenizer(),
        peft_config=adapter,
    )
    _, tensors = read_peft(files)
    loaded = peft.set_peft_model_state_dict(
        trainer.model, {name: torch.from_numpy(array) for name, array in tensors.items()}
    )
    assert not loaded.unexpected_keys
    return trainer


def theirs(trainer: Any, pairs: Sequence[dict[str, list[int]]], at_once: int) -> Found:
    """The mean over batches of `at_once` pairs."""
    batches = [pairs[first : first + at_once] for first in range(0, len(pairs), at_once)]
    total = 0.0
    for batch in batches:
        loss = trainer.compute_loss(trainer.model, trainer.data_collator(batch)) / len(batches)
        loss.backward()
        total += loss.item()
    rewards = trainer._metrics["train"]
    return Found(
        total,
        {
            name.replace(".default", ""): parameter.grad.numpy()
            for name, parameter in trainer.model.named_parameters()
            if parameter.grad is not None
        },
        {name: float(np.mean(rewards[by_trl])) for name, by_trl in REWARDS.items()},
    )


@pytest.mark.parametrize(
    ("family", "mesh", "smoothing"),
    [
        ("llama", plans.ONE_DEVICE, 0.0),
        ("llama", plans.case("fsdp=2,tensor=2", zero=3, microbatches=2), SMOOTHING),
        ("gpt2", plans.case("data=2,fsdp=2", zero=2), 0.0),
    ],
)
def test_a_step_computes_what_trl_does(family, mesh, smoothing, tmp_path):
    rows, pairs = packed_pairs()
    found = ours(mesh, family, smoothing, tmp_path / "adapter", rows)
    # TRL smooths labels in a loss that sorts a batch's pairs; a single one is in order.
    settings = {"loss_type": ["aot"], "label_smoothing": smoothing} if smoothing else {}
    trainer = trainer_of(family, tmp_path / "adapter", tmp_path / "trl", **settings)
    expected = theirs(trainer, pairs, at_once=1 if smoothing else len(pairs))
    assert found.loss == pytest.approx(expected.loss, rel=RTOL)
    assert abs(found.loss - np.log(2)) > 0.01  # of a model that is the reference
    # A reward is about one, its mean over pairs of either sign is less.
    assert found.rewards == pytest.approx(expected.rewards, rel=RTOL, abs=RTOL)
    assert found.gradients.keys() == expected.gradients.keys()
    # A zero of B in a fused matrix lies outside the blocks of ours, and PEFT would train it.
    _, blocks = read_peft(tmp_path / "adapter")
    for name, gradient in found.gradients.items():
        theirs_at = np.where(blocks[name] != 0, expected.gradients[name], 0)
        assert relative_error(gradient, theirs_at) < RTOL, name
