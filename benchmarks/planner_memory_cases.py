"""The lists of plans of planner_memory.py.

The formulas of the estimate were developed on *studied* with XLA's attention. After *fresh* with
XLA's attention they were changed once (the shares of attention scores). For cuDNN's attention one
constant was changed (STREAMS_AGAIN, what a recomputed layer produces), because of two cases of
benchmarks/gpu and not because of these lists. *families* has other families than GPT-2 and Llama,
and plans that split the stream's tokens; GATHERED_STREAMS was chosen before it was compiled.
*loops* has layers in loops with their own backward, and gradients scattered in 16 bits
(docs/decisions/0035). After the list that planner_memory.py draws at random, nothing was changed.

A line is a plan: model, tokens per example, examples of a microbatch on a device, mesh, settings.
"""

STUDIED = """
gpt2-xl      1024 2  data=8
gpt2-xl      1024 4  data=8                       microbatches=2 remat=selective
gpt2-xl      1024 8  fsdp=8
llama3-8b    4096 1  fsdp=8
llama3-8b    4096 2  fsdp=8                       remat=selective
llama3-8b    4096 1  pipe=4,tensor=2              microbatches=8
llama3.3-70b 4096 1  fsdp=64                      remat=full
llama3.3-70b 4096 1  pipe=8,tensor=8              microbatches=16 remat=selective
gpt2-xl      1024 4  fsdp=8                       zero=1 microbatches=4
gpt2-xl      1024 4  fsdp=8                       zero=2 microbatches=2 remat=dots
gpt2-xl      1024 16 fsdp=8                       microbatches=2 remat=full
gpt2-xl      1024 2  pipe=4,data=2                microbatches=8
gpt2-xl      1024 2  pipe=2,fsdp=4                microbatches=8 stage_residuals=recompute \
    remat=full
gpt2-xl      1024 2  pipe=4,fsdp=2                microbatches=8 zero=1 schedule=interleaved
gpt2-xl      1024 4  data=4,tensor=2              remat=selective rules=heads=none
llama3-8b    8192 1  fsdp=8                       remat=full
llama3-8b    2048 1  fsdp=8                       zero=1 microbatches=4 remat=full
llama3-8b    4096 2  tensor=8
llama3-8b    4096 2  fsdp=4,tensor=2              remat=dots
llama3-8b    4096 1  pipe=2,fsdp=2,tensor=2       microbatches=8 zero=2 stage_residuals=recompute \
    remat=full
llama3-8b    4096 1  pipe=2,tensor=4              microbatches=8 schedule=interleaved repeats=4 \
    stage_residuals=recompute remat=full
llama3-8b    2048 2  fsdp=2,tensor=4              zero=1 microbatches=4 remat=selective
llama3.3-70b 4096 1  fsdp=8                       remat=full
llama3.3-70b 4096 1  pipe=2,tensor=4              microbatches=4 stage_residuals=recompute \
    remat=full
gpt2-xl      1024 4  data=64                      remat=selective
gpt2-xl      1024 8  fsdp=64
gpt2-xl      1024 4  data=8,fsdp=8                zero=2 microbatches=4 remat=full
gpt2-xl      1024 1  pipe=8,data=8                microbatches=32 schedule=gpipe \
    stage_residuals=recompute
gpt2-xl      1024 2  pipe=8,data=8                microbatches=16 remat=selective
gpt2-xl      1024 2  pipe=4,data=16               microbatches=8 schedule=interleaved repeats=4 \
    remat=dots
llama3-8b    8192 1  fsdp=64
llama3-8b    4096 2  data=8,fsdp=8                microbatches=2 remat=selective
llama3-8b    4096 2  data=8,tensor=8              microbatches=2
llama3-8b    4096 1  pipe=4,data=8,tensor=2       microbatches=16 remat=selective
llama3-8b    2048 1  pipe=8,fsdp=8                microbatches=16 zero=1 remat=dots
llama3-8b    4096 2  data=4,fsdp=4,tensor=4       zero=2 remat=full
llama3-8b    2048 1  pipe=4,data=16               microbatches=8 schedule=gpipe \
    stage_residuals=recompute
llama3.3-70b 4096 2  fsdp=8,tensor=8              remat=selective
llama3.3-70b 4096 1  pipe=4,fsdp=4,tensor=4       microbatches=16 stage_residuals=recompute \
    remat=full
llama3.3-70b 4096 1  pipe=8,tensor=8              microbatches=16 schedule=interleaved
gpt2-xl      1024 2  data=256
gpt2-xl      1024 8  data=32,fsdp=8               remat=selective
gpt2-xl      1024 2  pipe=16,data=16              microbatches=32 stage_residuals=recompute \
    remat=full
gpt2-xl      1024 2  pipe=8,data=8,fsdp=4         microbatches=16 schedule=interleaved
llama3-8b    4096 1  data=32,fsdp=8
llama3-8b    4096 4  fsdp=64,tensor=4             remat=selective
llama3-8b    4096 1  pipe=8,data=16,tensor=2      microbatches=32 schedule=interleaved
llama3-8b    4096 1  pipe=2,data=4,fsdp=32        microbatches=8 stage_residuals=recompute \
    remat=dots
llama3.3-70b 4096 1  fsdp=256
llama3.3-70b 4096 1  data=4,fsdp=8,tensor=8       remat=dots
llama3.3-70b 4096 1  pipe=8,data=4,tensor=8       microbatches=32
llama3.3-70b 4096 1  pipe=16,fsdp=2,tensor=8      microbatches=32 zero=1 \
    stage_residuals=recompute remat=full
llama3.3-70b 4096 1  pipe=4,data=2,fsdp=4,tensor=8 microbatches=16 zero=2 schedule=gpipe remat=full
"""
FRESH = """
llama2-13b   4096 1  fsdp=16                      remat=selective
llama2-13b   2048 1  pipe=4,fsdp=4,tensor=2       microbatches=12 remat=full
gpt2-large   1024 4  pipe=2,data=4                microbatches=8 schedule=gpipe remat=selective
gpt2-large   1024 8  fsdp=4,data=2                zero=2 microbatches=3 remat=none
llama3.2-1b  8192 2  data=8                       remat=full
llama3.2-1b  4096 4  fsdp=2,tensor=4              zero=3 remat=selective
llama3-8b    4096 1  fsdp=8                       remat=full
llama3-8b    8192 1  pipe=4,tensor=8              microbatches=8 remat=full
llama3-8b    4096 1  pipe=2,fsdp=4                microbatches=8 schedule=interleaved repeats=2 \
    remat=selective
llama3-8b    2048 3  fsdp=16                      microbatches=2 remat=dots
llama3-8b    4096 1  pipe=8,data=4                microbatches=8 send_slack=true remat=selective
llama3.3-70b 8192 1  fsdp=32,tensor=8             remat=full
llama3.3-70b 2048 1  pipe=16,fsdp=8               microbatches=32 remat=full
llama3.3-70b 4096 1  pipe=8,fsdp=4,tensor=4       zero=1 microbatches=16 schedule=interleaved \
    stage_residuals=recompute remat=selective
llama3.3-70b 4096 1  data=8,fsdp=32               microbatches=2 remat=full
gpt2-xl      1024 4  pipe=8,fsdp=8                microbatches=8 zero=2 schedule=gpipe remat=dots
gpt2-xl      1024 4  fsdp=64                      microbatches=4 remat=selective
llama3-8b    4096 1  data=4,tensor=4              zero=0 microbatches=4 rules=mlp=none \
    remat=selective
"""
FAMILIES = """
mistral-7b   4096 1  fsdp=8
mistral-7b   4096 2  fsdp=4,tensor=2              remat=full
qwen3-8b     4096 1  fsdp=8                       remat=selective
qwen3-8b     4096 1  pipe=4,tensor=2              microbatches=8
qwen3-8b     4096 2  tensor=8                     sequence_parallel=true
gpt-j-6b     2048 2  fsdp=8
gpt-j-6b     2048 1  pipe=4,fsdp=2                microbatches=8 remat=full
gemma3-4b    4096 1  fsdp=8                       remat=full
llama3-8b    4096 4  tensor=8                     remat=full sequence_parallel=true
llama3-8b    4096 1  pipe=2,tensor=4              microbatches=8 sequence_parallel=true
llama3.3-70b 8192 1  pipe=4,fsdp=2,tensor=8       microbatches=8 remat=selective \
    sequence_parallel=true
"""
LOOPS = """
llama3-8b    4096 1  data=2,fsdp=4                overlap=layers
llama3-8b    4096 2  fsdp=8                       microbatches=2 remat=full overlap=layers
llama3-8b    4096 1  fsdp=8                       zero=1 overlap=layers
llama3-8b    4096 1  fsdp=8                       zero=2 overlap=layers
llama3-8b    4096 1  fsdp=8                       overlap=layers scatter=exchange
llama3-8b    4096 1  fsdp=8                       scatter=exchange
llama3-8b    4096 2  fsdp=4,tensor=2              overlap=halves
llama3-8b    4096 2  fsdp=4,tensor=2              sequence_parallel=true overlap=halves
llama3-8b    4096 2  pipe=2,tensor=4              microbatches=8 overlap=halves
llama3-8b    4096 1  data=8,fsdp=8                overlap=layers
llama3.3-70b 4096 1  fsdp=64                      remat=full overlap=layers
llama3.3-70b 4096 1  fsdp=64                      remat=full overlap=layers kept_layers=40
llama3.3-70b 4096 1  pipe=4,fsdp=2,tensor=8       microbatches=8 zero=1 overlap=layers
"""
