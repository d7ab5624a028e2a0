"""SlimPajama as a dataset of tensorflow-datasets, `slim_pajama`, with one config per domain.

It is made of local shards in SlimPajama's layout (`seqjax.data.shards`), the manual directory of tensorflow-datasets.
`python -m seqjax.data.build_slim_pajama` builds it; so does the package itself once this module is imported:

    tfds.builder("slim_pajama/arxiv", data_dir=DIR, file_format="array_record").download_and_prepare(
        download_config=tfds.download.DownloadConfig(manual_dir=SHARDS))

The book domain contains books3; a config of its own keeps it out of everything that does not name it.
"""

from collections.abc import Iterator
from typing import Any

from absl import logging

from seqjax.data import shards, slimpajama, tfds_datasets
from seqjax.errors import UserError

tfds: Any = tfds_datasets.require()

_DESCRIPTION = """\
Documents of SlimPajama, a deduplicated RedPajama, from local shards in its layout: one config per domain, with the
splits that the shards have. Licences are those of the sources.
"""


class SlimPajama(tfds.core.GeneratorBasedBuilder):
    """The documents of one domain in local shards, in an order that hashes of their places decide."""

    name = tfds_datasets.OWN
    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = tuple(
        tfds.core.BuilderConfig(name=domain.name, description=f"The rows of {domain.set_name}.")
        for domain in slimpajama.DOMAINS
    )
    url_infos = None  # Nothing is downloaded. The package looks for a file beside this one, which not all installs can.
    MANUAL_DOWNLOAD_INSTRUCTIONS = "Give the directory with the *.jsonl.zst shards."

    def _info(self) -> Any:
        return tfds.core.DatasetInfo(
            builder=self,
            description=_DESCRIPTION,
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            homepage="https://huggingface.co/datasets/cerebras/SlimPajama-627B",
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[str, dict[str, str]]]]:
        source, domain = str(dl_manager.manual_dir), self.builder_config.name
        found = [shard for shard in shards.find_shards(source) if shard.domain in (None, domain)]
        splits = {split: [s for s in found if s.split == split] for split in dict.fromkeys(s.split for s in found)}
        # A split without an example would end the building.
        splits = {split: of for split, of in splits.items() if next(self._generate_examples(of), None) is not None}
        if not splits:
            raise UserError(f"No shard in {source} has a document of {domain}; give shards that do, or other domains.")
        return {split: self._generate_examples(members) for split, members in splits.items()}

    def _generate_examples(self, members: list[shards.Shard]) -> Iterator[tuple[str, dict[str, str]]]:
        domain = self.builder_config.name
        for shard in members:
            skipped = shards.Skipped(shard.name)
            for _, text in shards.documents(shard, (domain,), skipped):
                yield f"{shard.name}:{skipped.lines}", {"text": text}
            for reason, n in skipped.reasons.items():
                logging.warning("%s: %d lines left out: %s.", shard.name, n, reason)
