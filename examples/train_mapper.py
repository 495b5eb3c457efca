"""Train a ProxyKV mapper: `nearfar train-mapper` as a script, for `accelerate launch`.

    python examples/train_mapper.py --proxy small --target large --sources books/ needles --out mapper
    accelerate launch --num_processes 4 examples/train_mapper.py --pairs mapper/pairs --batch-size 3 --out mapper

`--help` lists all options. The best mapper is in `<out>/model` and loads anywhere::

    from transformers import AutoModel

    mapper = AutoModel.from_pretrained("mapper/model", trust_remote_code=True)
    scores = mapper.predict(features)
"""

import sys

import torch

from nearfar.cli import main

if __name__ == "__main__":
    code = main(["train-mapper", *sys.argv[1:]])
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit(code)
