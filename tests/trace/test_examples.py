"""The tutorials of traced models, run unchanged with small local checkpoints under the names that they use."""

import re

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    BlipConfig,
    BlipForQuestionAnswering,
    BlipProcessor,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from tutorials import EXAMPLES, run
from zoo import PATCHES, randomized

WORDS = """translate english to german lets go home now eat good food the company huggingface is based in new york city
named after emoji s headquarters are situated manhattan what picture it dark ' . , : ?""".split()


def tokenizer():
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[DEC]", "[ENC]", *WORDS]
    return BertTokenizer(vocab={word: number for number, word in enumerate(vocabulary)})


SIZES = dict(vocab_size=80, pad_token_id=0)
TEXT = SIZES | dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)


@pytest.mark.parametrize("beams", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.slow
def test_t5(tmp_path, beams):
    options = SIZES | dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    model = randomized(T5ForConditionalGeneration(T5Config(**options, eos_token_id=1)))
    model.save_pretrained(tmp_path / "t5-large")
    words = tokenizer()
    words.save_pretrained(tmp_path / "t5-large")
    program = (EXAMPLES / "t5-greedy-decoding.md").read_text()
    changed = program.replace(
        "num_beams = 1\nnum_return_sequences = 1\nmax_length = 128",
        f"""
num_beams = {beams}
num_return_sequences = {beams}
max_length = 24""",
    )
    assert changed != program
    (tmp_path / "changed.md").write_text(changed)
    printed = run(tmp_path / "changed.md", tmp_path)
    inputs = words(
        "translate English to German: Lets eat good food.", max_length=24, padding="max_length", return_tensors="pt"
    )
    inputs.pop("token_type_ids", None)
    want = model.generate(**inputs, max_length=24, num_beams=beams, num_return_sequences=beams, do_sample=False)
    lines = [f"{number} {words.decode(row, skip_special_tokens=True)}" for number, row in enumerate(want, 1)]
    greedy = words.decode(model.generate(**inputs, max_length=24, do_sample=False)[0], skip_special_tokens=True)
    assert printed.splitlines() == [*lines, f"greedy {greedy}", *lines]
    assert max(map(len, lines)) > 20


def test_bert(tmp_path):
    model = randomized(BertForSequenceClassification(BertConfig(**TEXT, max_position_embeddings=512)))
    model.save_pretrained(tmp_path / "bert-base-cased-finetuned-mrpc")
    tokenizer().save_pretrained(tmp_path / "bert-base-cased-finetuned-mrpc")
    printed = run("bert-autobucketing.md", tmp_path)
    assert re.search(r"^122 .* paraphrase$", printed, re.M) and re.search(r"^444 .* paraphrase$", printed, re.M)


@pytest.mark.slow
def test_blip(tmp_path):
    directory = tmp_path / "Salesforce" / "blip-vqa-base"
    config = BlipConfig(
        text_config=TEXT | dict(bos_token_id=5, sep_token_id=3, eos_token_id=3, encoder_hidden_size=32),
        vision_config=PATCHES,
    )
    model = randomized(BlipForQuestionAnswering(config))
    model.save_pretrained(directory)
    BlipProcessor(BlipImageProcessorPil(size=dict(height=32, width=32)), tokenizer()).save_pretrained(directory)
    printed = run("blip-vqa.md", tmp_path)
    assert printed.count("Tracing") == 3
    assert len([line for line in printed.splitlines() if "?" in line]) == 2


def test_blip_s_parts_are_near():
    config = BlipConfig(text_config=TEXT | dict(encoder_hidden_size=32), vision_config=PATCHES)
    model = randomized(BlipForQuestionAnswering(config))
    torch.manual_seed(0)
    from transformers_neuronx.trace import trace

    pixels, ids, mask = torch.randn(1, 3, 32, 32), torch.randint(7, 50, (1, 8)), torch.ones(1, 8, dtype=torch.int64)
    seen = torch.ones(1, 17, dtype=torch.int64)
    with torch.no_grad():
        image = model.vision_model(pixels)
        question = model.text_encoder(ids, mask, encoder_hidden_states=image[0], encoder_attention_mask=seen)[0]
        logits = model.text_decoder(
            ids, mask, encoder_hidden_states=question, encoder_attention_mask=mask, use_cache=False
        ).logits
    got = trace(lambda x: model.vision_model(x), pixels)(pixels)
    parts = [(got["last_hidden_state"], image[0]), (got["pooler_output"], image[1])]
    inputs = ids, mask, image[0], seen
    read = trace(
        lambda i, m, h, s: model.text_encoder(i, m, encoder_hidden_states=h, encoder_attention_mask=s)[0], inputs
    )
    parts.append((read(*inputs), question))
    inputs = ids, mask, question
    write = trace(
        lambda i, m, h: model.text_decoder(i, m, encoder_hidden_states=h, encoder_attention_mask=m, use_cache=False)[
            "logits"
        ],
        inputs,
    )
    parts.append((write(*inputs), logits))
    for ours, theirs in parts:
        assert theirs.std() > 0.1
        torch.testing.assert_close(ours, theirs, atol=1e-5 * theirs.abs().max().item(), rtol=0)
