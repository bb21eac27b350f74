"""A task holds datasets, and says so to whoever brings rows of another kind."""

import pytest
from datasets import Dataset, DatasetDict

from grpo_kit.tasks import Task

ROWS = [{"prompt": [{"role": "user", "content": "What is 1 + 1?"}], "answer": "2"}]
DATASET = Dataset.from_list(ROWS)


@pytest.mark.parametrize("rows", [ROWS, None, DATASET.to_pandas(), DatasetDict(a=DATASET)])
def test_rows_that_are_no_dataset_are_refused_in_a_sentence(rows):
    message = f"are a {type(rows).__name__}: give a Dataset, by datasets.Dataset.from_list"
    with pytest.raises(TypeError, match=f"the train rows of task 'own' {message}"):
        Task("own", rows, DATASET)
    with pytest.raises(TypeError, match=f"the test rows of task 'own' {message}"):
        Task("own", DATASET, rows)
    assert Task("own", DATASET, DATASET).train[0]["answer"] == "2"
