"""The tutorials of decoders: they print what they show, and Transformers agrees for the same weights.

Small random models stand in for those that cannot be bundled, in directories with the names that tutorials use.
"""

import ast
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTJConfig, LlamaConfig, OPTConfig
from transformers.pytorch_utils import Conv1D
from tutorials import EXAMPLES, blocks, run

TINY_KJV = EXAMPLES / "tiny-kjv"
TEXT = "And it came to pass"
SIZES = dict(vocab_size=1023, bos_token_id=1022, eos_token_id=1022, pad_token_id=1022)
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_KJV, pad_token="<|endoftext|>", padding_side="left")


@pytest.fixture
def reference():
    return AutoModelForCausalLM.from_pretrained(TINY_KJV, attn_implementation="eager").eval()


def unshown(tutorial, printed):
    """Return what the tutorial prints in addition to the output that it shows, which must come in order."""
    rest = ""
    for block in blocks(tutorial, "text"):
        before, found, printed = printed.partition(block)
        assert found, f"{tutorial} shows what it does not print:\n{block}\nbut in its place:\n{before}"
        rest += before
    return rest + printed


def greedy(model, tokenizer, text, length, **options):
    ids = tokenizer(text, return_tensors="pt").input_ids
    tokens = model.generate(ids, max_length=length, do_sample=False, pad_token_id=1022, **options)
    return tokenizer.decode(tokens[0])


def stand_in(config, directory, tokenizer):
    """Save a small model whose logits differ clearly, and return it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model


@torch.inference_mode()
def shortfall(model, tokens, prompt):
    """Return how far chosen tokens after `prompt` are from the largest logit, at most, relative to it."""
    logits = model(torch.tensor([tokens])).logits[0, prompt - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[prompt:, None])[:, 0]
    return ((logits.amax(1) - chosen) / logits.abs().amax(1)).max().item()


def held_out(tokenizer, rows, columns):
    text = (TINY_KJV / "heldout.txt").read_text()
    return tokenizer(text, return_tensors="pt", verbose=False).input_ids[0, : rows * columns].view(rows, columns)


@torch.inference_mode()
def nats(model, windows, **options):
    """Return the mean loss of a token given those before it in its window."""
    logits = model(windows, **options).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()


def test_gpt2(tmp_path, tokenizer, reference):
    printed = run("gpt2-sampling.md", tmp_path)
    assert unshown("gpt2-sampling.md", printed) == ""
    text = greedy(reference, tokenizer, TEXT, 36)
    assert printed.count(text + "\n") == 1
    assert printed.count(text.removeprefix(TEXT) + "\n") == 2  # the streamer gets no prompt
    assert greedy(reference, tokenizer, TEXT, 36, num_beams=3) + "\n" in printed
    width = len(tokenizer(TEXT).input_ids)
    for text in ("Woe unto", "And Jesus answered"):
        length = 24 - width + len(tokenizer(text).input_ids)
        assert greedy(reference, tokenizer, text, length) + "\n" in printed


@pytest.mark.slow
def test_opt(tmp_path, tokenizer):
    config = OPTConfig(
        **SIZES, hidden_size=64, word_embed_proj_dim=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, init_std=0.3,
    )  # fmt: skip
    model = stand_in(config, tmp_path / "facebook" / "opt-13b", tokenizer)
    printed = run("facebook-opt-13b-sampling.md", tmp_path)
    rows = [ast.literal_eval(line) for line in printed.splitlines() if re.match(r"\[\d+, ", line)]
    prompts = [tokenizer(text).input_ids for text in ("Hello, I'm a language model,", "Today I believe that")]
    width = max(map(len, prompts))
    assert len(rows) == 4 and {len(row) for row in rows} == {64}
    for row, prompt in zip(rows, prompts * 2, strict=True):
        assert row[: width - len(prompt)] == [1022] * (width - len(prompt))
        assert row[width - len(prompt) : width] == prompt
    for row, prompt in zip(rows, prompts, strict=False):
        assert shortfall(model, row[width - len(prompt) :], len(prompt)) < 0.01
    assert rows[:2] != rows[2:]


@pytest.mark.slow
def test_gptj(tmp_path, tokenizer):
    config = GPTJConfig(**SIZES, n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=256, initializer_range=0.3)
    model = stand_in(config, tmp_path / "EleutherAI" / "gpt-j-6b", tokenizer)
    first, second, changed, beams = run("gptj-sampling.md", tmp_path).split("\n", 3)
    prompts = [tokenizer(text).input_ids for text in ("The best way to learn to program is", "My dog")]
    width = max(map(len, prompts))
    for line, prompt in zip((first, second), prompts, strict=True):
        tokens = ast.literal_eval(line)[width - len(prompt) :]
        assert tokens[: len(prompt)] == prompt and len(tokens) == 48 - width + len(prompt)
        assert shortfall(model, tokens, len(prompt)) < 0.05  # weights are rounded to 8 bits
    assert float(changed.removeprefix("padding changes ")) < 0.1
    assert beams.startswith("The best way to learn to program is")


def test_llama(tmp_path, tokenizer):
    config = LlamaConfig(
        **SIZES, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.3,
    )  # fmt: skip
    words = AutoTokenizer.from_pretrained(TINY_KJV, chat_template=CHAT)
    model = stand_in(config, tmp_path / "meta-llama" / "Llama-3.2-1B-Instruct", words)
    program = (EXAMPLES / "llama-chat.md").read_text()
    exact = program.replace('amp="bf16"', 'amp="f32"')
    assert exact != program
    (tmp_path / "exact.md").write_text(exact)
    printed = run(tmp_path / "exact.md", tmp_path)
    prompt = "system: You answer in one sentence.\nuser: Why is the sky blue?\nassistant:"
    ids = words(prompt, return_tensors="pt").input_ids
    tokens = model.generate(ids, max_new_tokens=48, do_sample=False, pad_token_id=1022)[0, ids.shape[1] :]
    answer = words.decode(tokens, skip_special_tokens=True)
    assert printed.startswith(answer)
    second = words(f"{prompt}{answer}\nuser: And at sunset?\nassistant:".replace("assistant:", "assistant: ", 1))
    assert re.search(rf"^prompt tokens +{len(second.input_ids)}$", printed, re.M)


def rounded(model, bits, group):
    """Round the weights of the model's layers to `bits`, with one scale per `group` inputs of an output."""
    for module in model.modules():
        if isinstance(module, Conv1D):  # [in, out]
            weight = module.weight.data.T
            groups = weight.unflatten(1, (-1, group or weight.shape[1]))
            if bits == 8:
                scale = groups.abs().amax(2, keepdim=True) / 127
            else:  # of the 16 values, the one without an opposite is the largest weight's
                least, most = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
                scale = (torch.where(most > -least, most, least) / -8).bfloat16().float()
            low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
            module.weight.data = ((groups / scale).round().clamp(low, high) * scale).flatten(1).T.contiguous()
    return model


def test_int8(tmp_path, tokenizer, reference):
    printed = run("int8-weights.md", tmp_path)
    assert unshown("int8-weights.md", printed) == ""
    windows = held_out(tokenizer, 4, 256)
    for width, bits, group in (("f32", None, None), ("s8", 8, None), ("s4", 4, 32)):
        model = (
            reference if bits is None else rounded(AutoModelForCausalLM.from_pretrained(TINY_KJV).eval(), bits, group)
        )
        [perplexity] = re.findall(rf"^{width} +[\d.]+ MB +([\d.]+)", printed, re.M)
        assert float(perplexity) == pytest.approx(torch.tensor(nats(model, windows)).exp().item(), rel=1e-4)
        assert f"{width}: {greedy(model, tokenizer, 'And God said unto Moses,', 24)}\n" in printed


@pytest.mark.slow
def test_context_encoding(tmp_path, tokenizer, reference):
    printed = run("context-encoding.md", tmp_path)
    assert unshown("context-encoding.md", printed) == ""
    ids = held_out(tokenizer, 1, 97)
    with torch.inference_mode():
        following = tokenizer.decode(reference(ids).logits[0, -1].argmax())
    assert printed.count(f"the same, then {following!r}\n") == 3


def test_serialization(tmp_path, tokenizer, reference):
    printed = run("serialization.md", tmp_path)
    logged = unshown("serialization.md", printed)
    programs = [
        re.findall(rf"^(\S+): {how} in [\d.]+ s$", logged, re.M) for how in ("compiled", "loaded from an artifact")
    ]
    used = set(programs[1])
    assert len(programs[0]) == 5 and used < {*programs[0]} and sorted(programs[1]) == sorted([*used] * 2)
    assert printed.count(greedy(reference, tokenizer, TEXT, 24) + "\n") == 3


@pytest.mark.slow
def test_several_models(tmp_path, tokenizer, reference):
    printed = run("several-models.md", tmp_path)
    assert unshown("several-models.md", printed) == ""
    draft = AutoModelForCausalLM.from_pretrained(EXAMPLES / "tiny-kjv-draft").eval()
    for tag, model in (("large", reference), ("small", draft)):
        assert f"{tag}: {greedy(model, tokenizer, TEXT, 24)}\n" in printed
        [loss] = re.findall(rf"^{tag}: ([\d.]+) nats a token$", printed, re.M)
        assert float(loss) == pytest.approx(nats(model, held_out(tokenizer, 1, 128)), abs=0.006)


def test_tensor_parallelism(tmp_path, tokenizer, reference):
    printed = run("tensor-parallelism.md", tmp_path)
    assert unshown("tensor-parallelism.md", printed) == ""
    for degree in (1, 2, 3):
        assert f"{degree} {greedy(reference, tokenizer, TEXT, 24)}\n" in printed


@pytest.mark.slow
def test_custom_layer(tmp_path, tokenizer, reference):
    printed = run("custom-layer.md", tmp_path)
    assert unshown("custom-layer.md", printed) == ""

    def mask(n, reach, sinks):
        seen = torch.zeros(4, n, n, dtype=torch.bool)
        for head in range(4):
            for token in range(n):
                seen[head, token, max(0, token - reach[head]) : token + 1] = True
                seen[head, token, : min(sinks, token + 1)] = True
        return torch.where(seen, 0.0, -1e9)[None]

    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.inference_mode():
        while ids.shape[1] < 48:
            logits = reference(ids, attention_mask=mask(ids.shape[1], [27, 255, 27, 255], 4)).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    assert tokenizer.decode(ids[0]) + "\n" in printed
    windows = held_out(tokenizer, 2, 256)
    shown = [float(number) for number in re.findall(r"([\d.]+)$", blocks("custom-layer.md", "text")[-1], re.M)]
    for number, (reach, sinks) in zip(
        shown, (([255] * 4, 0), ([31] * 4, 0), ([27] * 4, 4), ([27, 255, 27, 255], 4)), strict=True
    ):
        want = torch.tensor(nats(reference, windows, attention_mask=mask(256, reach, sinks))).exp().item()
        assert number == pytest.approx(want, abs=0.006)


def test_every_tutorial_is_listed_and_run():
    tutorials = {path.name for path in EXAMPLES.glob("*.md")} - {"README.md"}
    listing = (EXAMPLES / "README.md").read_text()
    tests = [path.read_text() for path in EXAMPLES.parent.glob("tests/*/test_*.py")]
    for tutorial in tutorials:
        assert f"]({tutorial})" in listing, f"examples/README.md does not mention {tutorial}"
        assert any(f'"{tutorial}"' in text for text in tests), f"no test runs {tutorial}"
    for document in tutorials | {"README.md"}:
        prose = re.sub(r"^```.*?^```", "", (EXAMPLES / document).read_text(), flags=re.S | re.M)
        for target in re.findall(r"\]\(([^)#]+)\)", prose):
            assert target.startswith("https://") or (EXAMPLES / target).exists(), f"{document} links to {target}"
