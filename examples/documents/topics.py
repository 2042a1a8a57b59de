"""Train the model in `model/`: the topic of an article from its sections, paragraphs and words.

`python examples/documents/topics.py --data-dir data` writes it again.
"""

import argparse
import json
import random
from pathlib import Path

from transformers import Trainer, TrainingArguments, set_seed

import polyscale as ps
from reproduction.documents.articles import read_articles

HERE = Path(__file__).parent


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="with enwik8")
    parser.add_argument("--output", type=Path, default=HERE / "model")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    articles = [one for one in read_articles(options.data_dir, 300, 1500) if one.topic]
    random.Random(0).shuffle(articles)
    train, test = articles[: len(articles) * 3 // 4], articles[len(articles) * 3 // 4 :]
    texts, labels = [one.text for one in train], [one.topic for one in train]
    processor = ps.HTEProcessor.from_documents(
        texts, labels, format="markdown", min_count=3, max_words=4000
    )
    set_seed(0)
    model = ps.HTEForClassification.from_processor(processor, hidden_size=32, dropout=0.1)
    rows = [
        {**processor.example(text), "labels": processor.label(label)}
        for text, label in zip(texts, labels, strict=True)
    ]
    arguments = TrainingArguments(
        output_dir=str(options.output) + "-training",
        num_train_epochs=options.epochs,
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        save_strategy="no",
        remove_unused_columns=False,
        report_to=[],
        seed=0,
    )
    Trainer(model, arguments, train_dataset=rows, data_collator=ps.collate_trees).train()
    model.save_pretrained(options.output)
    answers = model.predict([one.text for one in test])
    pairs = zip(answers, test, strict=True)
    right = sum(answer["label"] == one.topic for answer, one in pairs)
    found = {"articles": len(articles), "test": len(test), "right": right, "epochs": options.epochs}
    (options.output / "result.json").write_text(json.dumps(found, indent=1) + "\n")
    print(found)


if __name__ == "__main__":
    main()
