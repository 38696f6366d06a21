"""Chats with images: a server of a tiny Qwen3-VL against Transformers, and what is refused by name."""

import base64
import copy
import io
import json
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
from openai import BadRequestError, OpenAI
from PIL import Image
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from transformers_neuronx.cli import options as o, service
from transformers_neuronx.errors import CheckpointError
from transformers_neuronx.server.settings import Settings

sys.path.append(str(Path(__file__).parents[1] / "families"))
from multimodal import ATTRIBUTES
from parity import randomized

BEGIN, IMAGE, END, VIDEO = (f"<|{name}|>" for name in ("vision_start", "image_pad", "vision_end", "video_pad"))
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}" + BEGIN + IMAGE + END + "{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
)
POSITIONS, PATCHES = 320, 4096  # the most that the server's tower takes


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    """The directory of a checkpoint as the hub has them, its model in Transformers, its tokenizer and its processor."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_special_tokens(dict(additional_special_tokens=[BEGIN, IMAGE, END, VIDEO]))
    names = dict(vision_start_token_id=BEGIN, image_token_id=IMAGE, vision_end_token_id=END, video_token_id=VIDEO)
    attributes = copy.deepcopy(ATTRIBUTES["qwen3_vl"]) | {
        n: tokenizer.convert_tokens_to_ids(t) for n, t in names.items()
    }
    attributes["text_config"] |= dict(vocab_size=len(tokenizer), eos_token_id=1022, max_position_embeddings=POSITIONS)
    reference = randomized(CONFIG_MAPPING["qwen3_vl"].from_dict(attributes), AutoModelForImageTextToText)
    processor = Qwen2VLImageProcessorPil(patch_size=16, min_pixels=4 * 16**2, max_pixels=2**24)
    directory = tmp_path_factory.mktemp("vision")
    for each in (reference, tokenizer, processor):
        each.save_pretrained(directory)
    return directory, reference, tokenizer, processor


def serving(directory, **how):
    limits = dict(rows=2, positions=POSITIONS, queue={}, settings=Settings(), logs_json=False)
    paths, options = {str(directory): ["tiny"]}, o.How("f32", None, None, False, None)
    return service.Service(paths, None, options, **limits | how).opened()


@pytest.fixture(scope="module")
def client(checkpoint, started_with):
    with serving(checkpoint[0]) as server:
        yield OpenAI(base_url=f"{started_with(server).address()}/v1", api_key="none", max_retries=0)


def picture(height, width, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8))


def shown(image, kind="PNG"):
    """A part of a message with an image, as clients of OpenAI send it."""
    file = io.BytesIO()
    image.save(file, kind)
    url = f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
    return dict(type="image_url", image_url=dict(url=url, detail="auto"))


def said(text):
    return dict(type="text", text=text)


def asked(client, *messages, **options):
    messages = [dict(role="user", content=content) for content in messages]
    options = dict(max_tokens=8, temperature=0, logit_bias={}, extra_body=dict(ignore_eos=True)) | options
    return client.chat.completions.create(model="tiny", messages=messages, **options)


def generated(checkpoint, text, images):
    """What Transformers generates after a text with a place for each image."""
    _, reference, tokenizer, processor = checkpoint
    inputs = processor(images, return_tensors="pt")
    pieces = text.split(IMAGE)
    counts = (inputs.image_grid_thw.prod(1) // 4).tolist()
    text = pieces[0] + "".join(IMAGE * count + piece for count, piece in zip(counts, pieces[1:], strict=True))
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    image = tokenizer.convert_tokens_to_ids(IMAGE)
    inputs |= dict(input_ids=ids, mm_token_type_ids=(ids == image).int())
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    found = reference.generate(**inputs, attention_mask=torch.ones_like(ids), **options)
    return tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True), ids.shape[1]


def test_images_in_messages_are_those_of_transformers(checkpoint, client):
    assert client.models.list().data[0].capabilities == ["completion", "multimodal"]
    one, other = picture(64, 96), picture(128, 64, seed=1)
    answer = asked(client, [said("In the "), shown(one), said(" beginning")], "and then", [shown(other)])
    place = BEGIN + IMAGE + END
    text, tokens = generated(checkpoint, f"In the {place} beginning\nand then\n{place}\n", [one, other])
    assert answer.choices[0].message.content == text
    assert answer.usage.prompt_tokens == tokens


def test_a_stream_and_other_formats(checkpoint, client):
    """Transparency is dropped, and an image is turned as its camera says."""
    image = picture(64, 96)
    clear = image.convert("RGBA")
    turned, exif = image.rotate(90, expand=True), Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    file = io.BytesIO()
    turned.save(file, "PNG", exif=exif)
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    wanted, _ = generated(checkpoint, f"{BEGIN}{IMAGE}{END}\n", [image])
    for part in (shown(clear), shown(image, "BMP"), dict(type="image_url", image_url=url)):
        chunks = asked(client, [part], stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == wanted


def test_large_images_are_made_smaller(client, checkpoint):
    """The largest has a row for each four of PATCHES, whatever the checkpoint's processor allows."""
    messages = [dict(role="user", content=[shown(picture(1500, 1700), "JPEG")])]
    url = str(client.base_url).replace("/v1/", "/tokenize")
    with urlopen(Request(url, json.dumps(dict(messages=messages)).encode())) as response:
        tokens = json.load(response)["tokens"]
    assert 0.9 * PATCHES / 4 < tokens.count(checkpoint[2].convert_tokens_to_ids(IMAGE)) <= PATCHES / 4


REFUSED = {
    "no data": (dict(type="image_url", image_url=dict(url="https://example.org/a.png")), "must be a data URL"),
    "no image": (
        dict(type="image_url", image_url=dict(url="data:image/png;base64,aGVsbG8=")), "must be an image in one of BMP"
    ),
    "wrong base64": (dict(type="image_url", image_url=dict(url="data:image/png;base64,a")), "must be an image in one"),
    "no url": (dict(type="image_url", image_url=dict(href="x")), "must be of type text or image_url"),
    "a sound": (dict(type="input_audio", input_audio=dict(data="", format="wav")), "must be of type text or image_url"),
    "too narrow": (shown(picture(1, 300)), "the image processor refuses these images: absolute aspect ratio"),
    "the place of an image": (said(f"{BEGIN}{IMAGE}{END}"), "make 2 places for images, and there are 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_image_is_refused(client, name):
    part, message = REFUSED[name]
    with pytest.raises(BadRequestError, match=message):
        asked(client, [shown(picture(32, 32)), part])


def test_images_of_too_many_pixels_are_refused_unread(client):
    """Small files may hold huge images, and a request many of them."""
    half = shown(Image.new("1", (8192, 4097)))
    with pytest.raises(
        BadRequestError, match=r"content\[1\].image_url: .* 67108864 pixels together, and this one has 335"
    ):
        asked(client, [half, half])


def test_the_text_half_alone(checkpoint, started_with):
    with serving(checkpoint[0], text_only=True) as server:
        client = OpenAI(base_url=f"{started_with(server).address()}/v1", api_key="none", max_retries=0)
        assert asked(client, "In the beginning").choices[0].message.content
        with pytest.raises(BadRequestError, match=r"messages\[0\].content\[0\].image_url: this model reads no images"):
            asked(client, [shown(picture(32, 32))])


def test_a_checkpoint_without_its_processor_says_what_to_do(checkpoint, tmp_path):
    directory = tmp_path / "incomplete"
    directory.mkdir()
    for file in checkpoint[0].iterdir():
        if file.name != "preprocessor_config.json":
            (directory / file.name).symlink_to(file)
    with pytest.raises(CheckpointError, match=r"add preprocessor_config.json .*, or leave out images with --text-only"):
        o.Source(str(directory), images=True).image_processor()


def test_models_without_a_tower_are_opened_as_before():
    source = o.Source(str(Path(__file__).parents[2] / "examples" / "tiny-kjv"), images=True)
    assert not source.cls.family.images
