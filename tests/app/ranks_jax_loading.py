"""`python -m tests.app.ranks_jax_loading <options> <options>`: the memory that loading takes of one process of several."""

import json
import sys

import jax

from shared_specs.app.options import FinetuneOptions
from tests.loading import memory_of_loading
from tiled_jax.commands.finetune.trainer import JaxTrainer


def main(runs: list[str]) -> None:
    """The measurements of the last of the runs, whose options are JSON, as a line of JSON."""
    for given in runs:
        options, trainer = FinetuneOptions(**json.loads(given)), JaxTrainer()
        if not jax.distributed.is_initialized():
            trainer.join(options)
        trainer.sharded = True
        measured = memory_of_loading(trainer, options)
    held = {"kept": trainer._parameters, "moments": trainer._optimizer}
    here = {
        name: [part.data for leaf in jax.tree.leaves(tree) for part in leaf.addressable_shards]
        for name, tree in held.items()
    }
    print(json.dumps(measured | {name: sum(part.nbytes for part in parts) for name, parts in here.items()}), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
