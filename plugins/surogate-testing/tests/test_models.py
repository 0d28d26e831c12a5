import pytest

from surogate_core.plugin import UserError, bundles
from surogate_testing.models import describes_itself_to_formats


def family(describe):
    return bundles.ModelFamily(
        name="acme",
        hf_model_types=("acme",),
        build=lambda config: None,
        presets={"tiny": {"model_type": "acme"}},
        exports={"gguf": describe},
    )


def refuses(config):
    raise UserError("no such window")


def test_what_a_family_says_to_a_format_is_a_mapping_or_a_refusal():
    describes_itself_to_formats(family(lambda config: {"arch": config["model_type"]}))
    describes_itself_to_formats(family(refuses))
    for wrong in (None, {}, {1: "llama"}, "llama"):
        with pytest.raises(AssertionError, match=r"exports\['gguf'\] of preset tiny: .* is not a mapping"):
            describes_itself_to_formats(family(lambda config, wrong=wrong: wrong))
