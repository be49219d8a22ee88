"""Names of the parts of a step in compiled programs and in profiles of them.

The code of a part runs in `jax.named_scope(NAME)`, which changes nothing that is computed. The name
is then in the `op_name` of the instructions that come of it, in backward too
(planning/traces/step_parts.py); copies that the compiler adds have none.
"""

EMBEDDING = "embedding"
LAYER = "layer"
"""A block; what follows is inside."""
ATTENTION = "attention"
FEED_FORWARD = "feed_forward"
HEAD = "head"
"""Output head and loss."""
REFERENCE = "reference"
"""The pass of a task's reference."""
GENERATOR = "generator"
GRADIENTS = "gradients"
"""Sums of gradients over devices, and their norm."""
OPTIMIZER = "optimizer"
FORWARD_TASK = "forward_task"
"""A pipeline stage's forward of a microbatch."""
BACKWARD_TASK = "backward_task"
SCOPES = (
    EMBEDDING,
    LAYER,
    ATTENTION,
    FEED_FORWARD,
    HEAD,
    REFERENCE,
    GENERATOR,
    GRADIENTS,
    OPTIMIZER,
    FORWARD_TASK,
    BACKWARD_TASK,
)
