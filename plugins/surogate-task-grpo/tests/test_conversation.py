import pytest
from surogate_task_grpo.conversation import Renderer

from surogate_core.plugin import EncodeContext, bundles, encoding
from surogate_testing.chat_templates import CHATML, byte_tokenizer

QUESTION = {"role": "user", "content": "What is 2 + 2?"}
TASK = bundles.EnvironmentProblem(messages=(QUESTION,))
ANSWER = [{"role": "user", "content": "No. Again."}]


def follow(renderer, reply, *, end="<|im_end|>"):
    """The tokens before and after a reply and the environment's answer."""
    tokenizer = renderer.tokenizer
    prompt = renderer.prompt(TASK)
    ids = prompt + tuple(tokenizer(f"{reply}{end}", add_special_tokens=False)["input_ids"])
    text = renderer.text(prompt, ids[len(prompt) :])
    return ids, text, renderer.follow(TASK, ids, renderer.messages(TASK), text, ANSWER)


@pytest.mark.parametrize("name", ["chatml-short", "llama3", "gemma", "phi"])
def test_what_follows_a_reply_is_appended_to_the_sampled_tokens(renderer_of, name):
    renderer = renderer_of(name)
    end = renderer.tokenizer.convert_ids_to_tokens(next(iter(renderer.stop_ids)))
    ids, text, found = follow(renderer, "It is 5", end=end)
    assert text == "It is 5"
    assert found.extends
    assert found.ids[: len(ids)] == ids
    whole = [QUESTION, {"role": "assistant", "content": "It is 5"}, *ANSWER]
    rendered = renderer.tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    assert renderer.tokenizer.decode(found.ids) == rendered


def test_a_template_that_changes_earlier_turns_starts_a_new_sample(renderer_of):
    stripped = CHATML.replace("m.content + '<|im_end|>", "(m.content | trim) + '<|im_end|>")
    renderer = renderer_of("chatml-short", template=stripped)
    assert follow(renderer, "It is 5")[2].extends
    _, text, found = follow(renderer, "  It is 5")
    assert text == "  It is 5"
    assert not found.extends
    assert renderer.tokenizer.decode(found.ids).count("\nIt is 5<|im_end|>") == 1


def test_a_reply_that_ends_with_another_stop_token_starts_a_new_sample(renderer_of):
    renderer = renderer_of("chatml-short", stops=["<|endoftext|>"])
    _, text, found = follow(renderer, "It is 5", end="<|endoftext|>")
    assert text == "It is 5"
    assert not found.extends
    assert "<|endoftext|>" not in renderer.tokenizer.decode(found.ids)


def test_control_tokens_in_what_environments_say_are_text(renderer_of):
    renderer = renderer_of("chatml-short")
    prompt = renderer.prompt(bundles.EnvironmentProblem(messages=({"role": "user", "content": "Say <|im_end|>"},)))
    assert sum(token in renderer.stop_ids for token in prompt) == 1


def test_without_a_template_messages_are_plain_text():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    renderer = Renderer(tokenizer, templated=True, system="unused", stop_ids=frozenset({tokenizer.eos_token_id}))
    assert tokenizer.decode(renderer.prompt(TASK)) == "What is 2 + 2?"
    ids, _, found = follow(renderer, "5")
    assert found.extends
    assert tokenizer.decode(found.ids[len(ids) :]) == "No. Again."


def test_the_system_message_of_the_configuration_comes_first():
    tokenizer = byte_tokenizer()
    renderer = Renderer(tokenizer, templated=True, system="Be brief.", stop_ids=frozenset())
    assert tokenizer.decode(renderer.prompt(TASK)).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    own = bundles.EnvironmentProblem(messages=({"role": "system", "content": "Shout."}, QUESTION))
    assert "Be brief." not in tokenizer.decode(renderer.prompt(own))


@pytest.mark.parametrize("name", ["chatml-short", "llama3", "gemma", "phi"])
def test_the_ending_is_what_the_template_writes_behind_the_last_reply(renderer_of, name):
    renderer = renderer_of(name)
    tokenizer = renderer.tokenizer
    rendered = tokenizer.apply_chat_template([QUESTION, {"role": "assistant", "content": "It is 4"}], tokenize=False)
    assert f"It is 4{tokenizer.decode(renderer.ending())}" == rendered[rendered.index("It is 4") :]
    # As a reward model is trained on it.
    trained = encoding.encode_answer(
        QUESTION["content"], "It is 4", EncodeContext(tokenizer=tokenizer, sequence_len=200)
    )
    reply = tuple(tokenizer("It is 4", add_special_tokens=False)["input_ids"])
    assert (*renderer.prompt(TASK), *reply, *renderer.ending()) == tuple(trained.input_ids.tolist())


def test_a_text_ends_with_the_token_that_ends_texts():
    tokenizer = byte_tokenizer()
    renderer = Renderer(tokenizer, templated=False, system=None, stop_ids=frozenset())
    assert renderer.ending() == (tokenizer.eos_token_id,)


def test_without_a_template_a_prompt_that_writes_the_first_token_has_it_once():
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.add_bos_token = True
    renderer = Renderer(tokenizer, templated=False, system=None, stop_ids=frozenset())
    for text in ("Hi", "<|im_start|>Hi", " <|im_start|>Hi"):
        prompt = renderer.prompt(bundles.EnvironmentProblem(messages=({"role": "user", "content": text},)))
        assert tokenizer.decode(prompt) == "<|im_start|>Hi"
