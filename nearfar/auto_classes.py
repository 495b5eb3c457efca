"""Makes transformers' Auto classes know nearfar's models, so that they load without `trust_remote_code`."""

_registered = False


def register() -> None:
    """Register every model of nearfar, once."""
    global _registered
    if _registered:
        return
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

    from .configuration.configuration_axial_mapper import HybridAxialMapperConfig
    from .configuration.configuration_dar import DARConfig
    from .configuration.configuration_proxyformer import ProxyFormerConfig
    from .configuration.configuration_proxyformer_autoencoder import ProxyFormerAutoencoderConfig
    from .configuration.configuration_proxyformer_image import ProxyFormerImageConfig
    from .modeling.modeling_axial_mapper import HybridAxialMapper
    from .modeling.modeling_dar import DARForCausalLM, DARForSequenceClassification, DARModel
    from .modeling.modeling_proxyformer import ProxyFormerForCausalLM, ProxyFormerModel
    from .modeling.modeling_proxyformer_autoencoder import ProxyFormerAutoencoder
    from .modeling.modeling_proxyformer_image import ProxyFormerImageModel

    AutoConfig.register("dar", DARConfig)
    AutoModel.register(DARConfig, DARModel)
    AutoModelForCausalLM.register(DARConfig, DARForCausalLM)
    AutoModelForSequenceClassification.register(DARConfig, DARForSequenceClassification)
    AutoConfig.register("proxyformer", ProxyFormerConfig)
    AutoModel.register(ProxyFormerConfig, ProxyFormerModel)
    AutoModelForCausalLM.register(ProxyFormerConfig, ProxyFormerForCausalLM)
    AutoConfig.register("proxyformer_image", ProxyFormerImageConfig)
    AutoModel.register(ProxyFormerImageConfig, ProxyFormerImageModel)
    AutoConfig.register("proxyformer_autoencoder", ProxyFormerAutoencoderConfig)
    AutoModel.register(ProxyFormerAutoencoderConfig, ProxyFormerAutoencoder)
    AutoConfig.register("hybrid_axial_mapper", HybridAxialMapperConfig)
    AutoModel.register(HybridAxialMapperConfig, HybridAxialMapper)
    _registered = True
