import pytest
import text_generation_router
from text_generation_process.sampling import DRAWING
from text_generation_router.offline import SamplingParams
from text_generation_router.request import Grammar
from text_generation_router.validation import GenerateParameters


def test_defaults_are_those_of_vllm():
    asked = SamplingParams().to_parameters()
    assert asked.sampling == {
        "do_sample": True,
        "temperature": 1.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
    }
    assert asked.max_new_tokens == 16
    assert asked.stop == () and asked.grammar is None and not asked.keeps_stop_sequence


def test_everything_arrives():
    same = {
        **{"temperature": 0.5, "top_p": 0.75, "top_k": 40, "typical_p": 0.25, "min_p": 0.125},
        **{"repetition_penalty": 1.25, "frequency_penalty": 0.5, "presence_penalty": -0.5},
        **{"seed": 5, "stop": ("a", "b"), "deterministic": True},
    }
    params = SamplingParams(
        **same,
        max_tokens=None,
        min_tokens=3,
        logit_bias={7: -100.0},
        include_stop_str_in_output=True,
        ignore_eos=True,
        stop_token_ids=[9, 7, 9],
        logprobs=4,
        prompt_logprobs=True,
        regex="a+",
    )
    assert params.to_parameters() == GenerateParameters.of(
        inputs="",
        **same,
        do_sample=True,
        max_new_tokens=None,
        min_new_tokens=3,
        num_unstopped_tokens=3,
        logit_bias={7: -100.0},
        includes_stop=True,
        keeps_stop_sequence=False,
        ignore_eos_token=True,
        stop_token_ids=(9, 7),
        top_n_tokens=4,
        most_top_n_tokens=20,
        decoder_input_details=True,
        grammar=Grammar("regex", "a+"),
    )


@pytest.mark.parametrize("greedy", [{"temperature": 0}, {"top_p": 0.0}])
def test_greedy(greedy):
    asked = SamplingParams(**greedy, top_k=5, min_p=0.1).to_parameters()
    assert not asked.sampling["do_sample"] and asked.sampling.keys().isdisjoint(DRAWING)


@pytest.mark.parametrize(
    "given, kind, source",
    [
        ({"json_schema": {"type": "object"}}, "json_schema", '{"type":"object"}'),
        ({"json_schema": '{"type": "object"}'}, "json_schema", '{"type": "object"}'),
        ({"lark": "start: /a/"}, "lark", "start: /a/"),
    ],
)
def test_grammars(given, kind, source):
    assert SamplingParams(**given).to_parameters().grammar == Grammar(kind, source)


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"temperature": -1.0}, "`temperature`: Input should be greater than or equal to 0"),
        ({"top_k": 2**40}, "`top_k`"),
        ({"stop": ["a", ""]}, "a stop string must not be empty"),
        ({"stop_token_ids": 5}, "`stop_token_ids`"),
        ({"logit_bias": [(1, 1.0)]}, "`logit_bias`"),
        ({"logit_bias": {-1: 1.0}}, "`logit_bias`: Input should be greater"),
        ({"ignore_eos": 1}, "`ignore_eos`"),
        ({"regex": "a", "lark": "b"}, "exclude each other"),
    ],
)
def test_an_invalid_value_is_one_sentence(given, expected):
    with pytest.raises(ValueError, match=expected) as caught:
        SamplingParams(**given)
    assert "\n" not in str(caught.value)


def test_the_package_has_the_offline_names_and_no_others():
    assert text_generation_router.SamplingParams is SamplingParams
    assert text_generation_router.LLM.__name__ == "LLM"
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = text_generation_router.Llm
