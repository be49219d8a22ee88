"""Images that differ each time that they are learnt from.

Shapes: B rows, L length, P values of a patch, C channels, H height, W width.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optimus_jax.config import Config
from optimus_jax.data.batch import BATCH_ARRAYS, BatchArray
from optimus_jax.training.task import PATCHES, Batch

IMAGE_ARRAYS = {
    **BATCH_ARRAYS,
    "targets": BatchArray(np.int32, "label of the image, at its first token"),
    PATCHES: BatchArray(np.uint8, "pixels of the patch, channel by channel", per="patch"),
}
"""Arrays of a batch of images."""


def augmented(config: Config, rows: Batch, keys_B: Array) -> Batch:
    """Rows whose images are moved and mirrored as `config.augmentation` says.

    Args:
      keys_B: a key for every row; the changes depend on nothing else.
    """
    settings, model = config.augmentation, config.model
    if not settings.flip and not settings.shift:
        return rows
    patches_BLP, size = rows[PATCHES], model.patch_size
    side = model.image_size // size
    shape = len(patches_BLP), side, side, model.num_channels, size, size
    images_BCHW = (
        patches_BLP[:, 1:]
        .reshape(shape)
        .transpose(0, 3, 1, 4, 2, 5)
        .reshape(len(patches_BLP), model.num_channels, model.image_size, model.image_size)
    )

    def changed(image_CHW: Array, key: Array) -> Array:
        place, mirror = jax.random.split(key)
        if settings.shift:
            border = ((0, 0), (settings.shift, settings.shift), (settings.shift, settings.shift))
            wide = jnp.pad(image_CHW, border, mode="edge")
            start = jax.random.randint(place, (2,), 0, 2 * settings.shift + 1)
            image_CHW = lax.dynamic_slice(wide, (0, start[0], start[1]), image_CHW.shape)
        if settings.flip:
            image_CHW = jnp.where(jax.random.bernoulli(mirror), image_CHW[:, :, ::-1], image_CHW)
        return image_CHW

    images_BCHW = jax.vmap(changed)(images_BCHW, keys_B)
    grid = len(patches_BLP), model.num_channels, side, size, side, size
    patches = images_BCHW.reshape(grid).transpose(0, 2, 4, 1, 3, 5)
    patches = patches.reshape(len(patches_BLP), side * side, model.patch_values)
    return rows | {PATCHES: jnp.concatenate([patches_BLP[:, :1], patches], axis=1)}
