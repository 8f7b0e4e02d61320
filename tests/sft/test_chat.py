"""Token ids and loss masks of conversations, by templates and in the plain form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bailing_mtp.data.chat import Encoded, PlainFormat, TemplateFormat, open_format
from bailing_mtp.data.records import BadRecord, Conversation, Message, conversation_of, preference_of
from bailing_mtp.data.tokenizer import EOS_TOKEN, Tokenizer, train_tokenizer
from bailing_mtp.errors import UserError

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Drops what earlier assistant turns said, as templates of thinking models do.
FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% endif %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "four 4"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["be brief and say four 4 <assistant> <user> <system> User: Assistant:"] * 9, 300)


def template(tokenizer: Tokenizer, text: str = TEMPLATE) -> TemplateFormat:
    return TemplateFormat(tokenizer, text, "t.jinja", {"eos_token": EOS_TOKEN})


def parts(tokenizer: Tokenizer, encoded: Encoded) -> list[tuple[str, bool]]:
    """Runs of equal mask, decoded with special tokens."""
    runs: list[tuple[list[int], bool]] = []
    for token_id, trained in zip(*encoded, strict=True):
        if not runs or runs[-1][1] != trained:
            runs.append(([], trained))
        runs[-1][0].append(token_id)
    return [(tokenizer.decode(ids, skip_special=False), trained) for ids, trained in runs]


def test_template_trains_assistant_turns_with_their_end(tokenizer: Tokenizer):
    encoded = template(tokenizer).encode(conversation_of({"messages": TURNS}))
    assert parts(tokenizer, encoded) == [
        (f"<system>be brief{EOS_TOKEN}\n<user>1+1?{EOS_TOKEN}\n<assistant>", False),
        (f"2{EOS_TOKEN}", True),
        (f"\n<user>2+2?{EOS_TOKEN}\n<assistant>", False),
        (f"four 4{EOS_TOKEN}", True),
    ]
    assert encoded.token_ids.count(tokenizer.eos_id) == 5


def test_a_prompt_has_the_ids_of_its_conversation(tokenizer: Tokenizer):
    for chat in (template(tokenizer), PlainFormat(tokenizer)):
        encoded = chat.encode(conversation_of({"messages": TURNS}))
        for n_turns in (2, 4):
            ids = chat.encode_prompt(tuple(Message(t["role"], t["content"]) for t in TURNS[:n_turns]))
            assert encoded.token_ids[: len(ids)] == ids and encoded.loss_mask[len(ids)]
        text = Conversation("say ", "four")
        ids = chat.encode_prompt("say ")
        encoded = chat.encode(text)
        assert encoded.token_ids[: len(ids)] == ids and encoded.loss_mask.index(True) == len(ids)


def test_prompt_and_response_are_two_turns_of_a_template(tokenizer: Tokenizer):
    pair = conversation_of({"prompt": "1+1?", "response": "2"})
    turns = conversation_of({"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]})
    assert template(tokenizer).encode(pair) == template(tokenizer).encode(turns)


def test_plain_form(tokenizer: Tokenizer):
    chat = PlainFormat(tokenizer)
    assert parts(tokenizer, chat.encode(Conversation("Q: 1+1? A:", " 2"))) == [
        ("Q: 1+1? A:", False),
        (f" 2{EOS_TOKEN}", True),
    ]
    assert parts(tokenizer, chat.encode(conversation_of({"messages": TURNS}))) == [
        ("System: be brief\nUser: 1+1?\nAssistant:", False),
        (f" 2{EOS_TOKEN}", True),
        ("User: 2+2?\nAssistant:", False),
        (f" four 4{EOS_TOKEN}", True),
    ]
    spelled = chat.encode(Conversation(f"a{EOS_TOKEN}", "b"))
    assert spelled.token_ids.count(tokenizer.eos_id) == 1


def test_template_that_rewrites_history_is_refused_unless_one_turn_ends(tokenizer: Tokenizer):
    forgetful = template(tokenizer, FORGETFUL)
    with pytest.raises(BadRecord, match="turn 4 differently when more turns follow"):
        forgetful.encode(conversation_of({"messages": TURNS}))
    assert parts(tokenizer, forgetful.encode(conversation_of({"messages": TURNS[:3]})))[-1] == (f"2{EOS_TOKEN}", True)


def test_template_mistakes_are_named(tokenizer: Tokenizer):
    with pytest.raises(UserError, match="t.jinja: is no Jinja template"):
        template(tokenizer, "{% for %}")
    strict = template(tokenizer, "{{ raise_exception('no system turn') }}")
    with pytest.raises(BadRecord, match="no system turn"):
        strict.encode(Conversation("a", "b"))
    escape = template(tokenizer, "{{ messages.__class__.__mro__ }}")
    with pytest.raises(BadRecord, match="refuses it"):
        escape.encode(Conversation("a", "b"))


def test_where_the_template_comes_from(tokenizer: Tokenizer, tmp_path: Path):
    tokenizer.save(tmp_path)
    with pytest.raises(UserError, match="data.chat_template: null, and .* has no chat_template"):
        open_format(None, tokenizer, tmp_path)
    assert isinstance(open_format("plain", tokenizer, tmp_path), PlainFormat)
    with pytest.raises(UserError, match="data.chat_template: nowhere is no file"):
        open_format("nowhere", tokenizer, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    several = [{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    for value in (TEMPLATE, several):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": value}))
        chat = open_format(None, tokenizer, tmp_path / "tokenizer.json")
        assert chat.encode(Conversation("a", "b")) == template(tokenizer).encode(Conversation("a", "b"))
    (tmp_path / "chat_template.jinja").write_text(FORGETFUL)
    assert open_format(None, tokenizer, tmp_path).template == FORGETFUL
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0].content }}")
    assert open_format(str(own), tokenizer, tmp_path).template == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([1], "the line holds a list"),
        ({"text": "x"}, 'allowed: {"messages"'),
        ({"prompt": "x"}, 'allowed: {"messages"'),
        ({"prompt": "x", "response": " "}, '"response" is empty'),
        ({"prompt": 3, "response": "x"}, '"prompt" is a int'),
        ({"messages": []}, '"messages" is no list of turns'),
        ({"messages": [{"role": "user", "content": "x"}]}, "holds no assistant turn"),
        ({"messages": [{"role": "human", "content": "x"}]}, r'"messages\[0\].role" is \'human\''),
        ({"messages": [{"role": "user"}]}, r'"messages\[0\]" lacks'),
        ({"messages": [{"role": "assistant", "content": "\ud800"}]}, "half of a surrogate pair"),
    ],
)
def test_bad_conversations(record: object, reason: str):
    with pytest.raises(BadRecord, match=reason):
        conversation_of(record)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "x", "chosen": "a"}, '"rejected"'),
        ({"prompt": "x", "chosen": "a", "rejected": "a"}, "are the same"),
        ({"prompt": [{"role": "assistant", "content": "x"}], "chosen": "a", "rejected": "b"}, "ends with an assistant"),
        ({"prompt": "x", "chosen": [{"role": "user", "content": "a"}], "rejected": "b"}, "one assistant turn"),
    ],
)
def test_bad_preferences(record: object, reason: str):
    with pytest.raises(BadRecord, match=reason):
        preference_of(record)


def test_preferences_share_their_prompt():
    turns = [{"role": "user", "content": "x"}]
    reply = [{"role": "assistant", "content": "a"}]
    chosen, rejected = preference_of({"prompt": turns, "chosen": reply, "rejected": "b"})
    assert chosen == Conversation((Message("user", "x"),), "a") and rejected == Conversation(chosen.prompt, "b")
