"""vLLM's side of a weight sync by files: `--weight-transfer-config '{"backend": "trl_ext"}'`.

It imports vLLM, whose processes import it through the entry point `vllm.general_plugins`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "trl_ext"


@dataclass
class FirstFile(WeightTransferInitInfo):
    """A file in the trainer's folder."""

    path: str


@dataclass
class File(WeightTransferUpdateInfo):
    """A safetensors file with some of the model's weights, by their names in the checkpoint."""

    path: str


class FileEngine(WeightTransferEngine[FirstFile, File]):
    """Loads weights from files, as vLLM loads a checkpoint when it starts. The trainer writes and deletes the files."""

    init_info_cls = FirstFile
    update_info_cls = File

    def init_transfer_engine(self, init_info: FirstFile) -> None:
        Path(init_info.path).read_bytes()  # an error here is one of the trainer when it starts, not of its first sync

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's method also waits for the accelerator, and fails on a CPU. Copies from pageable memory are complete
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: File) -> None:
        with safe_open(update_info.path, framework="pt") as file:
            self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            pack_tied_head(self.model)

    def shutdown(self) -> None:
        pass


def pack_tied_head(model: torch.nn.Module) -> None:
    """Pack the head's weights again. vLLM 0.31's reload packs a tied embedding, but not the head that shares it."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)


def register() -> None:
    """Make `FileEngine` known to vLLM, which may call this more than once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FileEngine)
