"""A tokenizer of two dozen words, for trainers that want one."""

from typing import Any

WORDS = tuple(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau upsilon".split()
)


def tokenizer() -> Any:
    import tokenizers
    import transformers

    vocabulary = {word: number for number, word in enumerate(("<pad>", "<unk>", "<bos>", "<eos>", *WORDS))}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", unk_token="<unk>", bos_token="<bos>", eos_token="<eos>"
    )
