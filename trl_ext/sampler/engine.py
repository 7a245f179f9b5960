"""vLLM as TRL runs it, in the training process or as a server: its arguments, and the weights that it samples from."""

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from peft import PeftModel
from peft.tuners.ln_tuning.layer import LNTuningLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from ..compat.replaced import module_of, replaced
from ..compat.vllm import VLLMGeneration
from .adapter import adapter_files, unsupported_adapter
from .client import FileClient

logger = logging.getLogger("trl_ext")

_COLUMNS = 8  # of a matrix that are compared


class EngineGeneration(VLLMGeneration):
    """
    TRL's [`VLLMGeneration`], with weights that arrive unchanged, also where vLLM packs them after loading.

    With `enable_lora` among the engine's arguments, a sync sends the LoRA adapter alone.

    Args:
        engine_args (`dict`, *optional*):
            Further arguments of vLLM's `LLM`, in place of TRL's where both name one.

    Raises:
        `ValueError`: vLLM has no such argument.
    """

    def __init__(self, *positional: Any, engine_args: dict[str, Any] | None = None, **keywords: Any) -> None:
        self.engine_args = engine_args or {}
        self.bytes_sent = 0  # by the last sync
        self._adapters: tempfile.TemporaryDirectory[str] | None = None
        self._request: Any = None  # vLLM's, for the adapter that it samples with
        self._server_has_adapter = False  # the same on all ranks
        super().__init__(*positional, **keywords)

    def _init_vllm(self) -> None:
        with replaced(module_of(VLLMGeneration), **self._engine()):
            super()._init_vllm()
        if self.mode == "colocate" and self.engine_args.get("enable_lora"):
            reason = self.merged_reason(self.llm.llm_engine.vllm_config.lora_config.max_lora_rank)
            if reason is None and (differing_weight := self._differing_base()):
                reason = f"the base model on disk, which vLLM reads, is not the policy's (`{differing_weight[0]}`)"
            if reason is None:
                self._adapters = tempfile.TemporaryDirectory(prefix="trl_ext-")
            elif self.accelerator.is_main_process:
                logger.warning(f"The adapter is merged into the weights that vLLM gets: {reason}.")
        elif self.mode == "server":
            answer = [self.accelerator.is_main_process and self.vllm_client.sends_adapter]
            self._server_has_adapter = broadcast_object_list(answer, from_process=0)[0]

    def merged_reason(self, max_rank: int) -> str | None:
        """Return why vLLM gets merged weights instead of the adapter, or `None` if it can sample with the adapter."""
        if self.mode == "colocate" and self.enable_sleep_mode:
            return "`vllm_enable_sleep_mode` discards the weights of the base model"
        if self._is_sharded():
            return "the adapter is sharded"
        return unsupported_adapter(self.model, max_rank)

    def _is_sharded(self) -> bool:
        return self._dist.is_fsdp or self._dist.is_zero3

    def _engine(self) -> dict[str, Any]:
        """Return the replacements of `LLM` and `VLLMClient` in TRL's module."""
        if self.mode == "server":
            policy = self.model if isinstance(self.model, PeftModel) else None
            return {"VLLMClient": partial(FileClient, policy=policy, merged_reason=self.merged_reason)}
        llm = vars(module_of(VLLMGeneration)).get("LLM")
        if self.mode != "colocate" or llm is None or not self.engine_args:
            return {}
        from vllm.engine.arg_utils import EngineArgs

        fields_of_engine = {x.name for x in fields(EngineArgs)}
        unknown = [name for name in self.engine_args if name not in fields_of_engine]
        if unknown:
            raise ValueError(
                f"`vllm_engine_args` names {', '.join(map(repr, unknown))}, which vLLM's `EngineArgs` does not have. "
                "Correct the name, or leave it out."
            )
        return {"LLM": lambda **trl_args: llm(**(trl_args | self.engine_args))}

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the engine's weights; `None` in server mode."""
        return self.llm.llm_engine.model_config.dtype if self.mode == "colocate" else None

    @property
    def runner(self) -> Any:
        """vLLM's model runner in this process. Only in colocated mode."""
        return self.llm.llm_engine.model_executor.driver_worker.model_runner

    def sync_weights(self) -> None:
        self.bytes_sent = 0
        if self._adapters is not None:
            self._send_adapter(Path(self._adapters.name))
        elif self.mode == "colocate" and next(self.runner.get_model().parameters()).device.type == "cpu":
            self._reload()
        elif not self._server_has_adapter:
            super().sync_weights()
        elif self.accelerator.is_main_process:
            self.vllm_client.send_adapter()
        if self.mode == "server" and self.accelerator.is_main_process:
            self.bytes_sent = self.vllm_client.bytes_sent

    def _send_adapter(self, folder: Path) -> None:
        """Give vLLM the adapter under a new name, because it keeps keys and values of prompts by an adapter's name."""
        from vllm.lora.request import LoRARequest

        old_request = self._request
        number = 1 if old_request is None else old_request.lora_int_id + 1
        self.bytes_sent = adapter_files(self.model, folder / str(number))
        self._request = LoRARequest(f"policy-{number}", number, str(folder / str(number)))
        self.llm.llm_engine.add_lora(self._request)
        if old_request is not None:
            self.llm.llm_engine.remove_lora(old_request.lora_int_id)
            shutil.rmtree(old_request.lora_path)

    def generate(self, *positional: Any, **keywords: Any) -> Any:
        generate = {"generate": partial(self.llm.generate, lora_request=self._request)} if self._request else {}
        with replaced(self.llm, **generate) if generate else nullcontext():
            return super().generate(*positional, **keywords)

    def _reload(self) -> None:
        """Load the weights as when the engine starts: vLLM packs those of a CPU, where `load_weights` cannot write."""
        from .transfer import pack_tied_head

        self.runner.reload_weights(weights_iterator=((name, x.clone()) for name, x in self._iter_named_params()))
        pack_tied_head(self.runner.get_model())
        self.llm.reset_prefix_cache()

    def stale_weights(self) -> list[str] | None:
        """Return the names of the policy's parameters that the engine holds with other values.

        Some columns of a matrix are compared, as products with unit vectors, because a CPU's engine holds it packed.
        `None` if the engine is in another process or asleep, or holds shards or an adapter; and if reading the policy
        would gather its shards or merge in place, which must not happen between a forward and its backward. Every rank
        must call it.
        """
        if self.mode != "colocate" or self._adapters or self.enable_sleep_mode or self.tensor_parallel_size > 1:
            return None
        if self._is_sharded() or self._layers()[1]:
            return None
        engine = _EngineWeights(self.runner.get_model())
        bytes_sent = self.bytes_sent
        names = [name for name, param in self._iter_named_params() if engine.differs(name, param)]
        self.bytes_sent = bytes_sent  # reading the parameters is no sync
        return names

    def _differing_base(self) -> list[str]:
        """Return the base model's parameters that vLLM, which reads them from disk, holds with other values."""
        engine = _EngineWeights(self.runner.get_model())
        with replaced(self.model, merge_adapter=_nothing, unmerge_adapter=_nothing):
            return [name for name, param in super()._iter_named_params() if engine.differs(name, param)]

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield TRL's parameters, with the adapter merged into copies.

        TRL merges it into the weights and subtracts it afterwards, which leaves a rounding error in them at every sync.
        Here only sharded and quantized weights, experts' parameters and LN tuning are merged so.
        """
        copied_layers, other_layers = self._layers()
        merges = {}
        if copied_layers:
            merges["merge_adapter"] = lambda: [x.merge() for x in other_layers]
            merges["unmerge_adapter"] = lambda: [x.unmerge() for x in other_layers]
        merged_layer = ""
        merged_params: dict[str, Tensor] = {}
        with replaced(self.model, **merges):
            for name, param in super()._iter_named_params():
                module, _, kind = name.rpartition(".")
                if module in copied_layers and module != merged_layer:
                    merged_layer = module
                    merged_params = _merged(copied_layers[module])
                sent_param = merged_params[kind] if module in copied_layers else param
                self.bytes_sent += sent_param.numel() * sent_param.element_size()
                yield name, sent_param

    def _layers(self) -> tuple[dict[str, Any], list[Any]]:
        """Return the adapter's layers that merge into copies, by their names in vLLM, and those that cannot."""
        if not isinstance(self.model, PeftModel):
            return {}, []
        layers = {name: x for name, x in self.model.named_modules() if isinstance(x, BaseTunerLayer)}
        if self._dist.is_fsdp:
            return {}, [*layers.values()]
        copied = {name: x for name, x in layers.items() if _merges_into_copies(x)}
        other_layers = [x for name, x in layers.items() if name not in copied]
        return {name.removeprefix("base_model.model."): x for name, x in copied.items()}, other_layers


def _merges_into_copies(layer: Any) -> bool:
    base = layer.get_base_layer()
    params = dict(base.named_parameters(recurse=False))
    # LN tuning merges by exchanging modules
    is_plain = base is getattr(layer, "base_layer", None) and not isinstance(layer, LNTuningLayer)
    return is_plain and "weight" in params and all(x.is_floating_point() for x in params.values())


def _nothing(*_: Any, **__: Any) -> None:
    pass


@torch.no_grad()
def _merged(layer: Any) -> dict[str, Tensor]:
    """Return the parameters of an adapter's layer as PEFT merges them, and leave the layer's own as they are."""
    before = {name: (param, param.data) for name, param in layer.get_base_layer().named_parameters(recurse=False)}
    try:
        for param, data in before.values():
            param.data = data.clone()
        layer.merge()
        merged_params = {name: param.data.clone() for name, (param, _) in before.items()}
        layer.unmerge()
    finally:
        for param, data in before.values():
            param.data = data
    return merged_params


class _EngineWeights:
    """What an engine holds, by the names of the checkpoint."""

    def __init__(self, model: Any) -> None:
        self.modules = dict(model.named_modules())
        self.example = next(model.parameters())  # for the engine's device and dtype
        # Name of a matrix -> the module that holds it with others, and which one it is
        self.packed = {
            f"{owner}{part}": (f"{owner}{name}", parts.index(part))
            for name, parts in getattr(model, "packed_modules_mapping", {}).items()
            for owner in {path.removesuffix(name) for path in self.modules if path.endswith(f".{name}")}
            for part in parts
        }

    @torch.no_grad()
    def differs(self, name: str, param: Tensor) -> bool:
        """Return whether the engine holds other values than `param`; False where it cannot be compared."""
        path, _, kind = name.rpartition(".")
        holder, place = self.packed.get(path, (path, 0))
        module = self.modules.get(holder)
        policy_param = param.detach()
        module = getattr(module, "base_layer", module)  # below vLLM's LoRA
        engine_param = getattr(module, kind, None)
        if module is None or engine_param is None or kind not in ("weight", "bias"):
            return False
        if policy_param.dim() == 1:
            part = self._part(module, engine_param, place)
            return part.shape == policy_param.shape and not torch.equal(part.cpu(), policy_param.to(part).cpu())
        if policy_param.dim() != 2 or not policy_param.is_floating_point() or not hasattr(module, "quant_method"):
            return False
        columns = torch.linspace(0, policy_param.shape[1] - 1, _COLUMNS).long().unique()
        units_NI = torch.nn.functional.one_hot(columns, policy_param.shape[1]).to(self.example)
        try:
            products_NO = module.quant_method.apply(module, units_NI, None)
        except (RuntimeError, TypeError, NotImplementedError):  # a layer that computes something else
            return False
        part_ON = self._part(module, products_NO.t(), place)[: len(policy_param)]  # an embedding has rows of padding
        if len(part_ON) < len(policy_param):
            return False
        policy_ON = policy_param[:, columns.to(policy_param.device)].to(self.example)
        exact = self.example.dtype != torch.float32 or not self.example.is_cuda  # a GPU may round fp32 operands to TF32
        return not torch.allclose(part_ON, policy_ON, rtol=0.0 if exact else 2**-10, atol=0.0)

    def _part(self, module: Any, packed: Tensor, place: int) -> Tensor:
        """Return the rows of one of the layers that a module holds together; none if they are not found."""
        sizes = getattr(module, "output_sizes", [len(packed)])
        return packed.split(sizes)[place] if sum(sizes) == len(packed) and place < len(sizes) else packed[:0]
