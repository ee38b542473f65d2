"""What is asked of texts before they are tokenized."""

import pytest

from pbjax.errors import InputError
from pbjax.inference.texts import check_unicode


def test_texts_of_any_script_are_allowed():
    check_unicode("embed(texts)", ["", "harbour", "Rußland", "港", "\U0001f30a"])


@pytest.mark.parametrize("text", ["\udcff", "a\ud83d", "\udf0a b"])
def test_half_of_a_surrogate_pair_is_refused_by_its_number(text):
    with pytest.raises(InputError, match=r"embed\(texts\): text 1 is '.*\\ud.*no Unicode"):
        check_unicode("embed(texts)", ["good", text])
