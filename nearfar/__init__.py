"""nearfar: near tokens in full, far tokens compressed.

The public names below are loaded on first use, so `import nearfar` alone imports neither torch nor transformers::

    from nearfar import StreamingLLMCache

    cache = StreamingLLMCache(model, budget=512)
    model.generate(**inputs, past_key_values=cache)

With the first name, or at once if transformers has been imported before, transformers' Auto classes learn nearfar's
models.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# In a checkout the subpackages (modeling/, evaluation/, …) lie beside this folder rather than inside it. With the
# checkout on the search path, `import nearfar.modeling` therefore works without an install.
_parent = Path(__file__).resolve().parent.parent
if (_parent / "setup.py").is_file() and (_parent / "modeling" / "__init__.py").is_file():
    __path__.append(str(_parent))
del _parent

# Public name -> the submodule that defines it. The imports under TYPE_CHECKING say the same to type checkers.
_PUBLIC_NAMES: dict[str, str] = {
    "DARCache": "modeling.cache_dar",
    "DARConfig": "configuration.configuration_dar",
    "DARForCausalLM": "modeling.modeling_dar",
    "DARForSequenceClassification": "modeling.modeling_dar",
    "DARModel": "modeling.modeling_dar",
    "FlowMatchingPipeline": "modeling.pipeline_flow_matching",
    "H2OCache": "modeling.cache_h2o",
    "HybridAxialMapper": "modeling.modeling_axial_mapper",
    "HybridAxialMapperConfig": "configuration.configuration_axial_mapper",
    "IAMCache": "modeling.cache_iam",
    "KVzipCache": "modeling.cache_kvzip",
    "KeyPrototypes": "modeling.key_prototypes",
    "Mano": "training.mano",
    "ProactiveCache": "modeling.cache_proactive",
    "ProxyCache": "modeling.cache_proxy",
    "ProxyFormerAutoencoder": "modeling.modeling_proxyformer_autoencoder",
    "ProxyFormerAutoencoderConfig": "configuration.configuration_proxyformer_autoencoder",
    "ProxyFormerConfig": "configuration.configuration_proxyformer",
    "ProxyFormerForCausalLM": "modeling.modeling_proxyformer",
    "ProxyFormerImageConfig": "configuration.configuration_proxyformer_image",
    "ProxyFormerImageModel": "modeling.modeling_proxyformer_image",
    "ProxyFormerModel": "modeling.modeling_proxyformer",
    "ProxyKVCache": "modeling.cache_proxykv",
    "ProxyScorer": "modeling.proxy_scorer",
    "PrunedCache": "modeling.pruned_cache",
    "RandomCache": "modeling.cache_random",
    "SnapKVCache": "modeling.cache_snapkv",
    "StreamingLLMCache": "modeling.cache_streaming_llm",
}

if TYPE_CHECKING:
    from .configuration.configuration_axial_mapper import HybridAxialMapperConfig
    from .configuration.configuration_dar import DARConfig
    from .configuration.configuration_proxyformer import ProxyFormerConfig
    from .configuration.configuration_proxyformer_autoencoder import ProxyFormerAutoencoderConfig
    from .configuration.configuration_proxyformer_image import ProxyFormerImageConfig
    from .modeling.cache_dar import DARCache
    from .modeling.cache_h2o import H2OCache
    from .modeling.cache_iam import IAMCache
    from .modeling.cache_kvzip import KVzipCache
    from .modeling.cache_proactive import ProactiveCache
    from .modeling.cache_proxy import ProxyCache
    from .modeling.cache_proxykv import ProxyKVCache
    from .modeling.cache_random import RandomCache
    from .modeling.cache_snapkv import SnapKVCache
    from .modeling.cache_streaming_llm import StreamingLLMCache
    from .modeling.key_prototypes import KeyPrototypes
    from .modeling.modeling_axial_mapper import HybridAxialMapper
    from .modeling.modeling_dar import DARForCausalLM, DARForSequenceClassification, DARModel
    from .modeling.modeling_proxyformer import ProxyFormerForCausalLM, ProxyFormerModel
    from .modeling.modeling_proxyformer_autoencoder import ProxyFormerAutoencoder
    from .modeling.modeling_proxyformer_image import ProxyFormerImageModel
    from .modeling.pipeline_flow_matching import FlowMatchingPipeline
    from .modeling.proxy_scorer import ProxyScorer
    from .modeling.pruned_cache import PrunedCache
    from .training.mano import Mano

__all__ = [
    "DARCache",
    "DARConfig",
    "DARForCausalLM",
    "DARForSequenceClassification",
    "DARModel",
    "FlowMatchingPipeline",
    "H2OCache",
    "HybridAxialMapper",
    "HybridAxialMapperConfig",
    "IAMCache",
    "KVzipCache",
    "KeyPrototypes",
    "Mano",
    "ProactiveCache",
    "ProxyCache",
    "ProxyFormerAutoencoder",
    "ProxyFormerAutoencoderConfig",
    "ProxyFormerConfig",
    "ProxyFormerForCausalLM",
    "ProxyFormerImageConfig",
    "ProxyFormerImageModel",
    "ProxyFormerModel",
    "ProxyKVCache",
    "ProxyScorer",
    "PrunedCache",
    "RandomCache",
    "SnapKVCache",
    "StreamingLLMCache",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use.

    Raises:
        AttributeError: `name` is not a public name of nearfar.
    """
    submodule = _PUBLIC_NAMES.get(name)
    if submodule is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its public names: {', '.join(__all__)}")
    value = getattr(import_module(f"{__name__}.{submodule}"), name)
    globals()[name] = value
    _register_models()
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register_models() -> None:
    import_module(f"{__name__}.auto_classes").register()


if "transformers" in sys.modules:
    _register_models()
