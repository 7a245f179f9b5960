"""TRL's vLLM client and sampler. Only trainers that use vLLM import this file: others do without these names."""

from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

__all__ = ["VLLMClient", "VLLMGeneration"]
