"""The trainer's side of vLLM's server: weights as files, or the adapter alone, where TRL needs NCCL."""

import json
import logging
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor

from ..compat.vllm import VLLMClient
from .adapter import adapter_files, on_host

logger = logging.getLogger("trl_ext")

FILE_BYTES = 2**30
_MEMORY = Path("/dev/shm")
_NOT_REPEATED = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "v1/load_lora_adapter",
)
_NEEDS = {"v1/load_lora_adapter": "`VLLM_ALLOW_RUNTIME_LORA_UPDATING=True` in its environment"}
_SERVE = """`--weight-transfer-config '{"backend": "trl_ext"}'`"""


class FileClient(VLLMClient):
    """
    TRL's [`VLLMClient`], which also reaches a server without NCCL.

    What is sent depends on the server. One with `--enable-lora` gets the adapter of `policy`. One with the
    weight-transfer backend "trl_ext" gets weights in files of 1 GiB, or of one larger tensor. Any other gets TRL's NCCL
    broadcast.

    Args:
        policy (`peft.PeftModel`, *optional*):
            The model whose adapter may be sent alone.
        merged_reason (`Callable`, *optional*):
            Returns why it may not, or `None`, for the server's `max_lora_rank`.

    Attributes:
        bytes_sent (`int`): bytes of the weights in the last sync.
        sends_adapter (`bool`): whether only the adapter is sent.

    Raises:
        `ValueError`: the server cannot receive weights from this device, or does not see the folder.
        `RuntimeError`: the server could not load what was sent.
    """

    def __init__(
        self,
        *positional: Any,
        policy: PeftModel | None = None,
        merged_reason: Callable[[int], str | None] | None = None,
        **keywords: Any,
    ) -> None:
        self.policy = policy
        self.merged_reason = merged_reason
        self.bytes_sent = 0
        self.sends_adapter = False
        self.by_files = False
        self._folder: Path | None = None
        self._numbers = count()
        self._adapter: str | None = None  # the name of the one that the server has
        super().__init__(*positional, **keywords)
        # TRL repeats a request after an error of the server, but an update that failed cannot be repeated
        for route in _NOT_REPEATED:
            self.session.mount(f"{self.base_url}/{route}", type(self.session.get_adapter(self.base_url))())

    @property
    def folder(self) -> Path:
        """A new folder, in memory if there is room. It is removed with this client, or when the process ends."""
        if self._folder is None:
            in_memory = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= 4 * FILE_BYTES
            self._folder = Path(tempfile.mkdtemp(prefix="trl_ext-", dir=_MEMORY if in_memory else None))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        server = self._server()
        self.sends_adapter = self._takes_adapter(server["lora_config"])
        if self.sends_adapter:
            return
        backend = (server["weight_transfer_config"] or {}).get("backend")
        self.by_files = backend == "trl_ext"
        if self.by_files:
            self._init_files()
        elif isinstance(device, int) or torch.device(device).type == "cuda":
            super().init_communicator(device)
        else:
            transfer = "no weight-transfer backend" if backend is None else f"the weight-transfer backend {backend!r}"
            raise ValueError(
                f"The vLLM server at {self.base_url} has {transfer}, so it cannot receive weights from the device "
                f"'{device}'. Start it with {_SERVE}."
            )

    def _server(self) -> dict[str, Any]:
        answer = self.session.get(f"{self.base_url}/server_info", params={"config_format": "json"})
        if answer.status_code != 200:
            raise ValueError(
                f"The vLLM server at {self.base_url} answered {answer.status_code} to `/server_info`. Start it with "
                "`VLLM_SERVER_DEV_MODE=1` in its environment."
            )
        return answer.json()["vllm_config"]

    def _init_files(self) -> None:
        file = self.folder / "trainer"
        file.touch()
        try:
            self._ask("init_weight_transfer_engine", {"init_info": {"path": str(file)}})
        except RuntimeError as error:
            raise ValueError(
                f"The vLLM server at {self.base_url} does not see the trainer's folder {self.folder}. Run server "
                f"and trainer on one host and as the same user. Containers must share {self.folder.parent}."
            ) from error

    def _takes_adapter(self, lora: dict[str, Any] | None) -> bool:
        """Return whether the server samples with the adapter; if it refuses it, say why."""
        if lora is None or self.policy is None or self.merged_reason is None:
            return False
        reason = self.merged_reason(lora["max_lora_rank"])
        if reason is None:
            try:
                self.send_adapter()
                return True
            except RuntimeError as error:
                reason = str(error).removesuffix(".")
        logger.warning(
            f"The adapter is merged into the weights that vLLM gets, so each update sends all weights: {reason}."
        )
        return False

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, Tensor]]
    ) -> None:
        self.bytes_sent = 0
        if self.by_files:
            self._send_files(self._count_bytes(named_params))
        else:
            super().update_named_params(metadata, self._count_bytes(named_params))

    def _count_bytes(self, named_params: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, param in named_params:
            self.bytes_sent += param.numel() * param.element_size()
            yield name, param

    def send_adapter(self) -> None:
        """Send the adapter, and sample with it.

        Each sync gives it another name. vLLM keeps keys and values of prompts by an adapter's name, and reads the files
        of an adapter that it loaded "in place" at every forward pass.
        """
        old_name = self._adapter
        name = f"{self.folder.name}-{next(self._numbers)}"
        assert self.policy is not None
        self.bytes_sent = adapter_files(self.policy, self.folder / name)
        self._ask("v1/load_lora_adapter", {"lora_name": name, "lora_path": str(self.folder / name)})
        self.model = name
        self._adapter = name
        if old_name is not None:
            self._ask("v1/unload_lora_adapter", {"lora_name": old_name})
            shutil.rmtree(self.folder / old_name)

    def _send_files(self, named_params: Iterator[tuple[str, Tensor]]) -> None:
        if not self._updating_weights:
            self._start_weight_update()
        try:
            for tensors in _of_size(FILE_BYTES, named_params):
                self._send(tensors)
        except BaseException:
            if not self._updating_weights:
                with suppress(Exception):  # the server has ended the update if the error is its own
                    self._finish_weight_update()
            raise
        if not self._updating_weights:
            self._finish_weight_update()

    def _send(self, tensors: dict[str, Tensor]) -> None:
        path = self.folder / f"{next(self._numbers)}.safetensors"
        try:
            save_file(tensors, path)
            self._ask("update_weights", {"update_info": {"path": str(path)}})
        finally:
            path.unlink(missing_ok=True)

    def _ask(self, route: str, body: dict[str, Any]) -> None:
        answer = self.session.post(f"{self.base_url}/{route}", json=body)
        if answer.status_code == 200:
            return
        message = answer.text
        is_from_vllm = False
        with suppress(ValueError, LookupError, TypeError):
            message = json.loads(message)["error"]["message"]
            is_from_vllm = True
        if answer.status_code == 404 and not is_from_vllm and route in _NEEDS:
            raise RuntimeError(f"The vLLM server at {self.base_url} has no `/{route}`. Start it with {_NEEDS[route]}.")
        raise RuntimeError(f"The vLLM server at {self.base_url} refused `/{route}`: {message}")


def _of_size(most: int, named_params: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield copies in host memory, together as many as fit into `most` bytes, but at least one."""
    tensors: dict[str, Tensor] = {}
    size = 0
    for name, param in named_params:
        param_bytes = param.numel() * param.element_size()
        if tensors and size + param_bytes > most:
            yield tensors
            tensors = {}
            size = 0
        tensors[name] = on_host(param)
        size += param_bytes
    if tensors:
        yield tensors
