"""Habits of PyTorch users (wrappers in vLLM, NeuronPerf and speculation scripts on GitHub, 2023-25).

The model is a torch.nn.Module: eval() and half() of a parent, parameters counted, keys of the state_dict, isinstance
with the original's bases, hooks of calls, which see every token of sample(); context_pre_hook and context_hook,
assigned; attributes of the configuration, assigned; Hugging Face's text streamers handed to sample(). usage:
client_module_habits.py [MODEL_DIR]
"""
# ruff: noqa: E402

import threading

import _reference as ref
import torch
from transformers import AutoConfig, TextIteratorStreamer, TextStreamer

LENGTH, BANNED_AT = 24, 15
path, model = ref.checkpoint("llama", sharp=2e4)
rows, wants = ref.prompts(model, [9, 9], LENGTH, gap=40)
banned = [want[BANNED_AT] for want in wants]
text = list(rows[0])
while len(text) < LENGTH:
    scores = ref.logits(model, text)[-1].index_fill(0, torch.tensor(banned), -1e9)
    assert scores.topk(2).values.diff().abs() > 20
    text.append(int(scores.argmax()))
assert text != wants[0]
ref.package()

from transformers_neuronx import HuggingFaceGenerationModelAdapter, LlamaForSampling, base, module


class Tokenizer:
    def decode(self, ids, **options):
        return "".join(f"{int(i)} " for i in ids)


class Chat(torch.nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.lm = LlamaForSampling.from_pretrained(folder, batch_size=2, n_positions=32, tp_degree=2, amp="f32")
        self.lm.to_neuron()

    def forward(self, ids):
        return self.lm.sample(ids, sequence_length=LENGTH)


chat = Chat(path).eval()
neuron, ids = chat.lm, torch.tensor(rows)
assert isinstance(neuron, module.PretrainedModel) and isinstance(neuron, base.NeuronModelBase)
assert isinstance(neuron, torch.nn.Module) and neuron in list(chat.modules()) and not neuron.training
assert chat.train() is chat and neuron.training and chat.eval() is chat and neuron.eval() is neuron
assert sum(p.numel() for p in neuron.parameters()) == sum(p.numel() for p in model.parameters())
assert len(list(chat.parameters())) == 1 + len(list(model.parameters()))
names = {name.removeprefix("lm.").removeprefix("chkpt_model.") for name in chat.state_dict()}
assert names == {*model.state_dict(), "scale"}, names ^ {*model.state_dict(), "scale"}
for name, weight in neuron.state_dict().items():
    torch.testing.assert_close(weight, model.state_dict()[name.removeprefix("chkpt_model.")])
with torch.inference_mode():
    for moved in (chat, chat.to("cpu"), chat.half(), chat.float(), chat.requires_grad_(False)):
        ref.same("as a submodule", moved(ids), wants)

events, seen = [], []
neuron.context_pre_hook = lambda: events.append("before")
neuron.context_hook = lambda: events.append("after")
before = neuron.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()) or events.append("call"))
after = neuron.register_forward_hook(lambda _, args, logits: seen.append(logits.clone()))
ref.same("with hooks", chat(ids), wants)
fed = torch.cat(seen[::2], 1).tolist()
ref.same("what the hooks saw", [row[: LENGTH - 1] for row in fed], [want[:-1] for want in wants])
assert events[:4] == ["before", "call", "after", "call"], events
assert events.count("before") == events.count("after") == 1, events
for step, logits in enumerate(seen[1::2][: LENGTH - 9]):
    reference = torch.stack([ref.logits(model, want[: 9 + step])[-1] for want in wants])
    ref.close(f"logits of step {step}", logits, reference)
before.remove()
after.remove()
ban = neuron.register_forward_hook(lambda _, args, logits: logits.index_fill(1, torch.tensor(banned), -1e9))
ref.same("a hook that changes logits", chat(ids)[:1], [text])
ban.remove()
neuron.context_pre_hook = neuron.context_hook = None
count = len(events)
ref.same("without hooks", chat(ids), wants)
assert len(events) == count

neuron.config.pad_token_id, neuron.config.use_cache, neuron.config.of_mine = 0, True, "kept"
assert (neuron.config.pad_token_id, neuron.config.of_mine, neuron.config.vocab_size) == (0, "kept", ref.VOCAB)
adapter = HuggingFaceGenerationModelAdapter(AutoConfig.from_pretrained(path), neuron)
assert next(iter(adapter.parameters())).device == adapter.device == torch.device("cpu") and adapter.model is neuron

streamer = TextIteratorStreamer(Tokenizer())
options = dict(sequence_length=LENGTH, streamer=streamer, top_k=1)
alone = LlamaForSampling.from_pretrained(path, batch_size=1, n_positions=32, tp_degree=2, amp="f32")
alone.to_neuron()
thread = threading.Thread(target=alone.sample, args=(ids[:1],), kwargs=options)
thread.start()
assert "".join(streamer).split() == [str(i) for i in wants[0][9:]]
thread.join()


class Joined(TextStreamer):
    heard = ""

    def on_finalized_text(self, text, stream_end=False):
        self.heard += text


joined = Joined(Tokenizer())
alone.sample(ids[:1], sequence_length=LENGTH, streamer=joined)
assert joined.heard.split() == [str(i) for i in wants[0][9:]], joined.heard
print("ok")
