"""How Hugging Face stores the families: the table of their formats."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from optimus_jax.config import ModelConfig
from optimus_jax.errors import ConfigError, explain, nearest
from optimus_jax.models import huggingface_features as features
from optimus_jax.models.huggingface_format import HuggingFaceFormat, LabelHead, layer_tensors
from optimus_jax.models.layers import sinusoids
from optimus_jax.models.sound import TAPS

HEAD, HEAD_BIAS = "lm_head.weight", "lm_head.bias"
"""The head of classes for the next token."""

GPT2_SIZES = {
    "vocab_size": "vocab_size",
    "num_layers": "n_layer",
    "embed_dim": "n_embd",
    "num_heads": "n_head",
    "mlp_dim": "n_inner",
    "max_length": "n_positions",
    "tied": "tie_word_embeddings",
    "norm_epsilon": "layer_norm_epsilon",
    "init_std": "initializer_range",
}
GPT_NORMS = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
GPT_OUTSIDE = {
    "embedding/table": "wte.weight",
    "positions": "wpe.weight",
    "final_norm/scale": "ln_f.weight",
    "final_norm/bias": "ln_f.bias",
    "head/table": HEAD,
    "head_bias": HEAD_BIAS,
}
LLAMA_SIZES = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "embed_dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_dim": "intermediate_size",
    "max_length": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "init_std": "initializer_range",
}
LLAMA_OUTSIDE = {
    "embedding/table": "embed_tokens.weight",
    "final_norm/scale": "norm.weight",
    "head/table": HEAD,
}
LLAMA_ATTENTION = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
LLAMA_MLP = "mlp.gate_proj mlp.up_proj mlp.down_proj"
QK_NORMS = {
    "attention/query_norm": "self_attn.q_norm",
    "attention/key_norm": "self_attn.k_norm",
}
LLAMA_TENSORS = LLAMA_OUTSIDE | layer_tensors(
    LLAMA_ATTENTION,
    LLAMA_MLP,
    {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"} | QK_NORMS,
    "layers.{}.",
)
LLAMA = HuggingFaceFormat(
    architecture="LlamaForCausalLM",
    sizes=LLAMA_SIZES,
    defaults={"num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False},
    only={"hidden_act": ("silu",), "is_causal": (True,)},
    features=(features.ROTARY, features.BIASES),
    prefix="model.",
    tensors=LLAMA_TENSORS,
    buffers=("rotary_emb.inv_freq",),
)
GEMMA_TENSORS = LLAMA_OUTSIDE | layer_tensors(
    LLAMA_ATTENTION,
    LLAMA_MLP,
    {
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    }
    | QK_NORMS,
    "layers.{}.",
)
BERT_EMBEDDINGS = {
    "embedding/table": "embeddings.word_embeddings.weight",
    "positions": "embeddings.position_embeddings.weight",
    "token_types": "embeddings.token_type_embeddings.weight",
}
BERT_MATRICES = (
    "attention.self.query attention.self.key attention.self.value attention.output.dense",
    "intermediate.dense output.dense",
)
BERT_INSIDE = (
    BERT_EMBEDDINGS
    | {
        "embedding_norm/scale": "embeddings.LayerNorm.weight",
        "embedding_norm/bias": "embeddings.LayerNorm.bias",
    }
    | layer_tensors(
        *BERT_MATRICES,
        {"attention_out_norm": "attention.output.LayerNorm", "mlp_out_norm": "output.LayerNorm"},
        "encoder.layer.{}.",
    )
)
BERT_HEAD = {
    "table_out": "cls.predictions.transform.dense.weight",
    "transform_bias": "cls.predictions.transform.dense.bias",
    "transform_norm/scale": "cls.predictions.transform.LayerNorm.weight",
    "transform_norm/bias": "cls.predictions.transform.LayerNorm.bias",
    "head/table": "cls.predictions.decoder.weight",
    "head_bias": "cls.predictions.bias",
}
SPANS = {"label_table": "qa_outputs.weight", "head_bias": "qa_outputs.bias"}
TOKEN_LABELS = {"label_table": "classifier.weight", "head_bias": "classifier.bias"}
BERT = HuggingFaceFormat(
    architecture="BertForMaskedLM",
    architectures=("ForMaskedLM", "ForPreTraining", "Model"),
    sizes={
        "vocab_size": "vocab_size",
        "num_layers": "num_hidden_layers",
        "embed_dim": "hidden_size",
        "num_heads": "num_attention_heads",
        "mlp_dim": "intermediate_size",
        "max_length": "max_position_embeddings",
        "norm_epsilon": "layer_norm_eps",
        "init_std": "initializer_range",
    },
    defaults={"layer_norm_eps": 1e-12},
    only={
        "tie_word_embeddings": (True,),
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
    },
    features=(features.HIDDEN_ACTIVATION, features.TOKEN_TYPES),
    prefix="bert.",
    head_prefix="cls.",
    tensors=BERT_INSIDE | BERT_HEAD,
    buffers=(
        "embeddings.position_ids",
        "pooler.dense.weight",
        "pooler.dense.bias",
        "cls.seq_relationship.weight",
        "cls.seq_relationship.bias",
        "cls.predictions.decoder.bias",
    ),
    older_endings={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    label_heads={
        "sequence": LabelHead(
            architecture="BertForSequenceClassification",
            prefix="classifier.",
            tensors={
                "table_out": "pooler.dense.weight",
                "transform_bias": "pooler.dense.bias",
                "label_table": "classifier.weight",
                "head_bias": "classifier.bias",
            },
        ),
        "token": LabelHead(
            architecture="BertForTokenClassification",
            prefix="classifier.",
            tensors=TOKEN_LABELS,
        ),
        "span": LabelHead(
            architecture="BertForQuestionAnswering",
            prefix="qa_outputs.",
            tensors=SPANS,
        ),
    },
)


def _vit_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    size = config.patch_size
    return {
        "embeddings.cls_token": (1, 1, config.embed_dim),
        "embeddings.mask_token": (1, 1, config.embed_dim),
        "decoder.0.weight": (config.patch_values, config.embed_dim, 1, 1),
        "embeddings.position_embeddings": (1, config.max_length, config.embed_dim),
        "embeddings.patch_embeddings.projection.weight": (
            config.embed_dim,
            config.num_channels,
            size,
            size,
        ),
    }


def _whisper_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {
        "encoder.conv1.weight": (config.embed_dim, config.mel_bins, TAPS),
        "encoder.conv2.weight": (config.embed_dim, config.embed_dim, TAPS),
    }


HUGGING_FACE_FORMATS: dict[str, HuggingFaceFormat] = {
    "gpt2": HuggingFaceFormat(
        architecture="GPT2LMHeadModel",
        sizes=GPT2_SIZES,
        defaults={"n_inner": None, "tie_word_embeddings": True},
        only={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        prefix="transformer.",
        tensors=GPT_OUTSIDE
        | {
            "layers/attention_norm/scale": "h.{}.ln_1.weight",
            "layers/attention_norm/bias": "h.{}.ln_1.bias",
            "layers/attention/query layers/attention/key_value": "h.{}.attn.c_attn.weight",
            "layers/attention/query_bias layers/attention/key_value_bias": "h.{}.attn.c_attn.bias",
            "layers/attention/out": "h.{}.attn.c_proj.weight",
            "layers/attention/out_bias": "h.{}.attn.c_proj.bias",
            "layers/mlp_norm/scale": "h.{}.ln_2.weight",
            "layers/mlp_norm/bias": "h.{}.ln_2.bias",
            "layers/mlp/up": "h.{}.mlp.c_fc.weight",
            "layers/mlp/up_bias": "h.{}.mlp.c_fc.bias",
            "layers/mlp/down": "h.{}.mlp.c_proj.weight",
            "layers/mlp/down_bias": "h.{}.mlp.c_proj.bias",
        },
        out_dim=-1,
        buffers=(".attn.bias", ".attn.masked_bias"),
    ),
    "gpt_neo": HuggingFaceFormat(
        architecture="GPTNeoForCausalLM",
        sizes={
            "vocab_size": "vocab_size",
            "num_layers": "num_layers",
            "embed_dim": "hidden_size",
            "num_heads": "num_heads",
            "mlp_dim": "intermediate_size",
            "max_length": "max_position_embeddings",
            "tied": "tie_word_embeddings",
            "norm_epsilon": "layer_norm_epsilon",
            "init_std": "initializer_range",
        },
        defaults={"intermediate_size": None, "tie_word_embeddings": True},
        only={"activation_function": ("gelu_new", "gelu_pytorch_tanh")},
        features=(features.GPT_NEO,),
        prefix="transformer.",
        tensors=GPT_OUTSIDE
        | layer_tensors(
            " ".join(f"attn.attention.{name}_proj" for name in ("q", "k", "v", "out")),
            "mlp.c_fc mlp.c_proj",
            GPT_NORMS,
            "h.{}.",
        ),
        buffers=(".attn.attention.bias", ".attn.attention.masked_bias"),
    ),
    "gptj": HuggingFaceFormat(
        architecture="GPTJForCausalLM",
        sizes=GPT2_SIZES,
        defaults={"n_inner": None, "tie_word_embeddings": False},
        only={"activation_function": ("gelu_new", "gelu_pytorch_tanh")},
        features=(features.GPTJ,),
        prefix="transformer.",
        tensors=GPT_OUTSIDE
        | layer_tensors(
            "attn.q_proj attn.k_proj attn.v_proj attn.out_proj",
            "mlp.fc_in mlp.fc_out",
            {"attention_norm": "ln_1"},
            "h.{}.",
        ),
        buffers=(".attn.bias", ".attn.masked_bias", ".attn.embed_positions"),
    ),
    "opt": HuggingFaceFormat(
        architecture="OPTForCausalLM",
        sizes={
            "vocab_size": "vocab_size",
            "num_layers": "num_hidden_layers",
            "embed_dim": "hidden_size",
            "num_heads": "num_attention_heads",
            "mlp_dim": "ffn_dim",
            "max_length": "max_position_embeddings",
            "tied": "tie_word_embeddings",
            "init_std": "init_std",
        },
        defaults={"tie_word_embeddings": True, "init_std": 0.02},
        only={"layer_norm_elementwise_affine": (True,)},
        features=(features.OPT,),
        prefix="model.decoder.",
        tensors={
            "embedding/table": "embed_tokens.weight",
            "positions": "embed_positions.weight",
            "table_in": "project_in.weight",
            "table_out": "project_out.weight",
            "final_norm/scale": "final_layer_norm.weight",
            "final_norm/bias": "final_layer_norm.bias",
            "head/table": HEAD,
        }
        | layer_tensors(
            "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj",
            "fc1 fc2",
            {
                "attention_norm": "self_attn_layer_norm",
                "attention_out_norm": "self_attn_layer_norm",
                "mlp_norm": "final_layer_norm",
                "mlp_out_norm": "final_layer_norm",
            },
            "layers.{}.",
        ),
    ),
    "bert": BERT,
    "megatron-bert": replace(
        BERT,
        architecture="MegatronBertForMaskedLM",
        tensors=BERT_EMBEDDINGS
        | BERT_HEAD
        | {"final_norm/scale": "encoder.ln.weight", "final_norm/bias": "encoder.ln.bias"}
        | layer_tensors(
            *BERT_MATRICES,
            {"attention_norm": "attention.ln", "mlp_norm": "ln"},
            "encoder.layer.{}.",
        ),
        older_endings={},
        label_heads={
            place: replace(head, architecture=f"Megatron{head.architecture}")
            for place, head in BERT.label_heads.items()
        },
    ),
    "vit": HuggingFaceFormat(
        architecture="ViTForMaskedImageModeling",
        architectures=("ForMaskedImageModeling", "Model"),
        sizes={
            "num_layers": "num_hidden_layers",
            "embed_dim": "hidden_size",
            "num_heads": "num_attention_heads",
            "mlp_dim": "intermediate_size",
            "image_size": "image_size",
            "patch_size": "patch_size",
            "num_channels": "num_channels",
            "norm_epsilon": "layer_norm_eps",
            "init_std": "initializer_range",
        },
        defaults={
            "layer_norm_eps": 1e-12,
            "image_size": 224,
            "patch_size": 16,
            "num_channels": 3,
        },
        features=(features.PIXELS,),
        fixed={"vocab_size": 1, "tied": False},
        derived=lambda sizes: {"max_length": (sizes["image_size"] // sizes["patch_size"]) ** 2 + 1},
        file_shapes=_vit_shapes,
        only={"hidden_act": ("gelu",), "qkv_bias": (True,)},
        prefix="vit.",
        head_prefix="decoder.",
        tensors={
            "label_table": "decoder.0.weight",
            "head_bias": "decoder.0.bias",
            "hidden_patch": "embeddings.mask_token",
            "embedding/table": "embeddings.cls_token",
            "positions": "embeddings.position_embeddings",
            "patches": "embeddings.patch_embeddings.projection.weight",
            "patch_bias": "embeddings.patch_embeddings.projection.bias",
            "final_norm/scale": "layernorm.weight",
            "final_norm/bias": "layernorm.bias",
        }
        | layer_tensors(
            "attention.attention.query attention.attention.key attention.attention.value"
            " attention.output.dense",
            "intermediate.dense output.dense",
            {"attention_norm": "layernorm_before", "mlp_norm": "layernorm_after"},
            "encoder.layer.{}.",
        ),
        buffers=("pooler.dense.weight", "pooler.dense.bias"),
        label_heads={
            "sequence": LabelHead(
                architecture="ViTForImageClassification",
                prefix="classifier.",
                tensors=TOKEN_LABELS,
            )
        },
    ),
    "whisper": HuggingFaceFormat(
        architecture="WhisperForConditionalGeneration",
        architectures=("ForConditionalGeneration", "Model"),
        # Sizes of the decoder; `derived` adds those of the encoder.
        sizes={
            "vocab_size": "vocab_size",
            "num_layers": "decoder_layers",
            "encoder_layers": "encoder_layers",
            "embed_dim": "d_model",
            "num_heads": "encoder_attention_heads",
            "mlp_dim": "encoder_ffn_dim",
            "max_length": "max_target_positions",
            "frames": "max_source_positions",
            "mel_bins": "num_mel_bins",
            "tied": "tie_word_embeddings",
            "init_std": "init_std",
        },
        defaults={
            "num_mel_bins": 80,
            "max_source_positions": 1500,
            "max_target_positions": 448,
            "tie_word_embeddings": True,
        },
        features=(features.DECODER_SIDE,),
        derived=lambda sizes: {
            "num_layers": sizes["encoder_layers"] + sizes["num_layers"],
            "max_length": sizes["frames"] + sizes["max_length"],
        },
        file_shapes=_whisper_shapes,
        only={
            "activation_function": ("gelu",),
            "scale_embedding": (False,),
            "is_encoder_decoder": (True,),
        },
        prefix="model.",
        head_prefix="proj_out.",
        tensors={
            "sound/first": "encoder.conv1.weight",
            "sound/first_bias": "encoder.conv1.bias",
            "sound/second": "encoder.conv2.weight",
            "sound/second_bias": "encoder.conv2.bias",
            "embedding/table": "decoder.embed_tokens.weight",
            "positions": "decoder.embed_positions.weight",
            "final_norm/scale": "decoder.layer_norm.weight",
            "final_norm/bias": "decoder.layer_norm.bias",
            "head/table": "proj_out.weight",
            "layers/cross/encoder_norm/scale": "encoder.layer_norm.weight",
            "layers/cross/encoder_norm/bias": "encoder.layer_norm.bias",
        }
        | layer_tensors(
            "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj",
            "fc1 fc2",
            {"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"},
            "{side}.layers.{}.",
        )
        | layer_tensors(
            "encoder_attn.q_proj encoder_attn.k_proj encoder_attn.v_proj encoder_attn.out_proj",
            "",
            {"norm": "encoder_attn_layer_norm"},
            "{side}.layers.{}.",
            ours="cross/",
        ),
        buffers=("encoder.embed_positions.weight",),
        constants=lambda config: {
            "encoder.embed_positions.weight": np.asarray(
                sinusoids(jnp.arange(config.frames)[None], config.embed_dim)[0]
            )
        },
    ),
    "electra": replace(
        BERT,
        architecture="ElectraForMaskedLM",
        architectures=("ForMaskedLM", "ForPreTraining", "Model"),
        only={**BERT.only, "hidden_act": ("gelu",)},
        features=(features.TOKEN_TYPES, features.TABLE_WIDTH),
        prefix="electra.",
        head_prefix="generator_",
        tensors=BERT_INSIDE
        | {
            "table_in": "embeddings_project.weight",
            "table_bias": "embeddings_project.bias",
            "table_out": "generator_predictions.dense.weight",
            "transform_bias": "generator_predictions.dense.bias",
            "transform_norm/scale": "generator_predictions.LayerNorm.weight",
            "transform_norm/bias": "generator_predictions.LayerNorm.bias",
            "head/table": "generator_lm_head.weight",
            "head_bias": "generator_lm_head.bias",
        },
        buffers=(
            "embeddings.position_ids",
            *(
                f"discriminator_predictions.{name}.{kind}"
                for name in ("dense", "dense_prediction")
                for kind in ("weight", "bias")
            ),
        ),
        label_heads={
            "replacement": LabelHead(
                architecture="ElectraForPreTraining",
                prefix="discriminator_predictions.",
                tensors={
                    "table_out": "discriminator_predictions.dense.weight",
                    "transform_bias": "discriminator_predictions.dense.bias",
                    "label_table": "discriminator_predictions.dense_prediction.weight",
                    "head_bias": "discriminator_predictions.dense_prediction.bias",
                },
            ),
            "sequence": LabelHead(
                architecture="ElectraForSequenceClassification",
                prefix="classifier.",
                tensors={
                    "table_out": "classifier.dense.weight",
                    "transform_bias": "classifier.dense.bias",
                    "label_table": "classifier.out_proj.weight",
                    "head_bias": "classifier.out_proj.bias",
                },
            ),
            "token": LabelHead(
                architecture="ElectraForTokenClassification",
                prefix="classifier.",
                tensors=TOKEN_LABELS,
            ),
            "span": LabelHead(
                architecture="ElectraForQuestionAnswering",
                prefix="qa_outputs.",
                tensors=SPANS,
            ),
        },
    ),
    "llama": LLAMA,
    "mistral": replace(
        LLAMA,
        architecture="MistralForCausalLM",
        head_width_is_whole=False,
        defaults={**LLAMA.defaults, "num_key_value_heads": 8},
        features=(features.ROTARY, features.WINDOW),
    ),
    "qwen2": replace(
        LLAMA,
        architecture="Qwen2ForCausalLM",
        head_width_is_whole=False,
        features=(features.ROTARY, features.QWEN_WINDOW),
    ),
    "qwen3": replace(
        LLAMA,
        architecture="Qwen3ForCausalLM",
        head_width_is_whole=False,
        defaults={**LLAMA.defaults, "head_dim": 128},
        features=(features.ROTARY, features.ATTENTION_BIAS, features.QWEN_WINDOW),
    ),
    "olmo2": replace(
        LLAMA,
        architecture="Olmo2ForCausalLM",
        head_width_is_whole=False,
        features=(features.ROTARY, features.ATTENTION_BIAS),
        tensors=LLAMA_OUTSIDE
        | layer_tensors(
            LLAMA_ATTENTION,
            LLAMA_MLP,
            {
                "attention_out_norm": "post_attention_layernorm",
                "mlp_out_norm": "post_feedforward_layernorm",
            }
            | QK_NORMS,
            "layers.{}.",
        ),
    ),
    "phi3": replace(
        LLAMA,
        architecture="Phi3ForCausalLM",
        head_width_is_whole=False,
        features=(features.ROTARY, features.PHI3),
        tensors=LLAMA_OUTSIDE
        | {
            "layers/attention_norm/scale": "layers.{}.input_layernorm.weight",
            "layers/attention/query layers/attention/key_value": (
                "layers.{}.self_attn.qkv_proj.weight"
            ),
            "layers/attention/out": "layers.{}.self_attn.o_proj.weight",
            "layers/mlp_norm/scale": "layers.{}.post_attention_layernorm.weight",
            "layers/mlp/up": "layers.{}.mlp.gate_up_proj.weight",
            "layers/mlp/down": "layers.{}.mlp.down_proj.weight",
        },
    ),
    "gemma2": replace(
        LLAMA,
        architecture="Gemma2ForCausalLM",
        defaults={"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True},
        only={
            "hidden_activation": ("gelu_pytorch_tanh", "gelu_new"),
            "use_bidirectional_attention": (None, False),
        },
        features=(features.ROTARY, features.ATTENTION_BIAS, features.GEMMA2),
        tensors=GEMMA_TENSORS,
    ),
    "gemma3_text": replace(
        LLAMA,
        architecture="Gemma3ForCausalLM",
        defaults={"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True},
        only={
            "hidden_activation": ("gelu_pytorch_tanh", "gelu_new"),
            "use_bidirectional_attention": (None, False),
        },
        features=(features.ROTARY, features.ATTENTION_BIAS, features.GEMMA3),
        tensors=GEMMA_TENSORS,
    ),
}


def format_of(model: ModelConfig) -> HuggingFaceFormat:
    """How Hugging Face stores a model. Raises ConfigError if no class has such a one."""
    hf_format = family_format(model.family)
    if not model.labels:
        return hf_format
    if (head := hf_format.label_head(model.labelled)) is None:
        raise ConfigError(
            explain(
                f"no class of transformers for {model.family} has a label of each {model.labelled}",
                given=f"model.labels={','.join(model.labels)}",
                do="use a model of the family bert, megatron-bert or electra",
            )
        )
    return hf_format.with_label_head(head)


def family_format(family: str) -> HuggingFaceFormat:
    """How Hugging Face stores a family. Raises ConfigError if it is not among ours."""
    if family not in HUGGING_FACE_FORMATS:
        raise ConfigError(
            explain(
                "Hugging Face models of this type are not among ours",
                given=f"model_type={family[:80]!r}",
                do=nearest(family, HUGGING_FACE_FORMATS),
            )
        )
    return HUGGING_FACE_FORMATS[family]
