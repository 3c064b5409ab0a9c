"""Detection: Deformable DETR (Zhu et al., ICLR 2021) with hybrid matching on any backbone.

The layers are those of transformers; this module combines them. Trains nothing, reads no file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DeformableDetrConfig
from transformers.models.deformable_detr.modeling_deformable_detr import (
    DeformableDetrDecoder,
    DeformableDetrEncoder,
    DeformableDetrMLPPredictionHead,
    DeformableDetrSinePositionEmbedding,
    inverse_sigmoid,
)

from hetdpt.core.errors import ModelError
from hetdpt.core.modules import evaluating
from hetdpt.tasks.annotated import AnnotatedBatch, Target
from hetdpt.tasks.backbone import Backbone
from hetdpt.tasks.hybrid import Answer, MatchedLoss, Truth, Weights, apart, objects_per_process, repeated
from hetdpt.tasks.model import TaskModel

PRIOR = 0.01
"""Initial probability of an object of each class."""
SMALLEST = 0.05
"""Side of the boxes that positions of the finest map propose, relative to the image; twice that on the next map."""
BASE = 10000.0
"""The longest wavelength of a position encoding over the shortest."""
NEVER = -100.0
"""The logit of a query that is not reported: no object has such a low score."""
NOWHERE = (10.0, 10.0, 0.1, 0.1)
"""A box so far outside that no object is matched with it while another box is left."""


@dataclass(frozen=True, kw_only=True)
class DetectorConfig:
    """How a detector is built; the defaults are the paper's, or H-Deformable-DETR's where the paper does not say."""

    width: int = 256
    """Channels of the encoder and the decoder."""
    heads: int = 8
    """Heads of every attention."""
    points: int = 4
    """Sampling points of a head on each map."""
    hidden: int = 2048
    """Channels between the two layers of an FFN."""
    encoder_layers: int = 6
    """Layers of the encoder, in which positions of the maps attend to each other."""
    decoder_layers: int = 6
    """Layers of the decoder, in which queries attend to the maps; each refines the boxes of the one before."""
    maps: int = 3
    """How many maps of the backbone are used, the coarsest ones: strides 8, 16 and 32 of a pyramid that starts at 4.
    The others are not computed."""
    further_maps: int = 1
    """Additional maps, each with twice the stride, computed by convolutions."""
    queries: int = 300
    """Queries that are matched one to one: the maximum number of objects found in an image."""
    extra_queries: int = 1500
    """Additional queries in training, matched one to many; 0 for none."""
    repeats: int = 6
    """How many of the additional queries each object is matched with."""
    extra_weight: float = 1.0
    """Weight of the loss of the additional queries."""
    dropout: float = 0.0
    """Dropout rate of the encoder and the decoder."""
    label_weight: float = 2.0
    """Weight of labels in loss and matching."""
    box_weight: float = 5.0
    """Weight of the distance between boxes."""
    overlap_weight: float = 2.0
    """Weight of the overlap of boxes."""
    detections: int = 100
    """Maximum number of objects reported for an image."""

    def __post_init__(self) -> None:
        sizes = ("width", "heads", "points", "hidden", "encoder_layers", "decoder_layers")
        for name in (*sizes, "maps", "queries", "repeats", "detections"):
            _require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("further_maps", "extra_queries", "extra_weight", "label_weight", "box_weight", "overlap_weight"):
            _require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}; it must be 0 or more")
        _require(any(self.weights), "label_weight, box_weight and overlap_weight are all 0; nothing would be learned")
        _require(0 <= self.dropout < 1, f"dropout is {self.dropout}; it must be at least 0 and below 1")
        each, rest = divmod(self.width, self.heads)
        is_even = rest == 0 and self.width % 4 == 0 and each & (each - 1) == 0
        _require(
            is_even,
            f"width is {self.width} for {self.heads} heads; it must be a multiple of 4 that gives each head 1, 2, 4, "
            "8, ... channels",
        )

    @property
    def weights(self) -> Weights:
        """The weights of loss and matching."""
        return Weights(self.label_weight, self.box_weight, self.overlap_weight)


class Detections(NamedTuple):
    """The objects found in one image, by descending score."""

    boxes: Tensor
    """(n, 4): left, top, right and bottom in pixels of the image file."""
    scores: Tensor
    """(n,): confidence, 0 to 1."""
    labels: Tensor
    """(n,)."""


class Detector(TaskModel):
    """Finds objects: two-stage Deformable DETR with box refinement, mixed selection and look-forward-twice.

    ``forward(images, targets)`` is the loss; ``forward(images)`` is the :class:`Answer` of the last layer's one-to-one
    queries. ``valid`` (B, 2) are height and width of each image relative to the canvas, which targets contain already;
    boxes are relative to the image, not to the canvas.
    """

    task: ClassVar[str] = "detection"
    config: DetectorConfig

    def __init__(self, backbone: Backbone, classes: Sequence[str], config: DetectorConfig) -> None:
        super().__init__(backbone.coarsest_(config.maps), classes, config)
        width, library = config.width, _library_config(config)
        self.projections = _projections(backbone, config)
        size = backbone.input_size[1:]
        _check_places(config.queries + config.extra_queries, _places(backbone, config), size)
        self.positions = DeformableDetrSinePositionEmbedding(width // 2, normalize=True)
        self.levels = nn.Parameter(torch.randn(len(self.projections), width))
        self.encoder = DeformableDetrEncoder(library)
        self.proposing = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width))
        self.proposal_score = _scores(width, 1)
        self.proposal_box = _boxes(width)
        self.contents = nn.Parameter(torch.randn(config.queries + config.extra_queries, width))
        self.places = nn.Sequential(nn.Linear(2 * width, width), nn.LayerNorm(width))
        decoder: Any = DeformableDetrDecoder(library)
        decoder.bbox_embed = nn.ModuleList(_boxes(width) for _ in range(config.decoder_layers))
        self.decoder = decoder
        for part in (self.encoder.layers, self.decoder.layers):
            _begin_(part)
        self.scores_of = nn.ModuleList(_scores(width, len(self.classes)) for _ in range(config.decoder_layers))
        self._loss = MatchedLoss(len(self.classes), config.weights)
        self._proposal_loss = MatchedLoss(1, config.weights)

    def forward(
        self, images: Tensor, targets: Sequence[Target] | None = None, valid: Tensor | None = None
    ) -> Tensor | Answer:
        if targets is not None:
            valid = torch.stack([target["valid"] for target in targets])
        elif valid is None:
            valid = images.new_ones(len(images), 2)
        first, answers = self._answers(images, valid)
        if targets is None:
            return answers[-1].part(slice(self.config.queries))
        return self._total(first, answers, [_of_image(target) for target in targets])

    def _answers(self, images: Tensor, valid: Tensor) -> tuple[Answer, list[Answer]]:
        """Return the proposals of all positions of the maps, and the queries' answers after each layer of the decoder.

        Positions outside the image propose nothing. In evaluation, queries that start there find nothing.
        """
        memory = self._encoded(images, valid)
        first, proposals = self._proposed(memory, valid)
        queries = self.config.queries + (self.config.extra_queries if self.training else 0)
        _check_places(queries, proposals.shape[1], images.shape[2:])
        scores = first.logits[..., 0].masked_fill(~memory.is_seen, -torch.inf)
        best = scores.topk(queries, dim=1).indices  # (B, Q)
        reference = proposals.gather(1, best[..., None].expand(-1, -1, 4)).sigmoid().detach()  # (B, Q, 4)
        answers = self._decoded(memory, reference)
        if not self.training:
            is_inside = memory.is_seen.gather(1, best)
            answers = [answer._replace(logits=_told(answer.logits, is_inside)) for answer in answers]
        return _of_places(first, memory.is_seen), answers

    def _encoded(self, images: Tensor, valid: Tensor) -> _Memory:
        maps = self.backbone(images)
        inputs = [*maps, *[maps[-1]] * min(1, self.config.further_maps)]
        sources = [project(one) for project, one in zip(self.projections, inputs, strict=False)]
        for project in self.projections[len(sources) :]:
            sources.append(project(sources[-1]))
        shapes = [(one.shape[2], one.shape[3]) for one in sources]
        seen = [_seen(shape, valid) for shape in shapes]
        positions = [
            self.positions(one.shape, one.device, one.dtype, is_seen) + level[:, None, None]
            for one, is_seen, level in zip(sources, seen, self.levels, strict=True)
        ]
        layout = _layout(shapes, valid)
        is_seen = torch.cat([one.flatten(1) for one in seen], dim=1)
        found = self.encoder(
            inputs_embeds=_flat(sources), attention_mask=is_seen, spatial_position_embeddings=_flat(positions), **layout
        )
        return _Memory(found.last_hidden_state, is_seen, shapes, layout)

    def _proposed(self, memory: _Memory, valid: Tensor) -> tuple[Answer, Tensor]:
        """Return the proposal of each position, and its boxes before the sigmoid (first stage)."""
        features = self.proposing(memory.features * memory.is_seen[..., None])
        anchors = _anchors(memory.shapes, valid)  # (B, N, 4)
        boxes = self.proposal_box(features) + inverse_sigmoid(anchors)
        return Answer(self.proposal_score(features), boxes.sigmoid()), boxes

    def _decoded(self, memory: _Memory, reference: Tensor) -> list[Answer]:
        """Return the queries' answers after each layer, starting from the boxes ``reference`` (B, Q, 4).

        Their positions come from the first stage, their contents are learned (mixed selection).
        """
        count = reference.shape[1]
        is_hybrid = count > self.config.queries
        mask = apart(self.config.queries, count - self.config.queries, reference.device) if is_hybrid else None
        found = self.decoder(
            inputs_embeds=self.contents[:count].expand(len(reference), -1, -1),
            object_queries_position_embeddings=self.places(_waves(reference, self.config.width // 2)),
            encoder_hidden_states=memory.features,
            encoder_attention_mask=memory.is_seen,
            reference_points=reference,
            attention_mask=None if mask is None else mask[None, None],
            **memory.layout,
        )
        states = found.intermediate_hidden_states.unbind(1)
        deltas = [head(state) for head, state in zip(self.decoder.bbox_embed, states, strict=True)]
        boxes = look_forward_twice(deltas, reference)
        logits = [score(state) for score, state in zip(self.scores_of, states, strict=True)]
        return [Answer(*one) for one in zip(logits, boxes, strict=True)]

    def _total(self, first: Answer, answers: list[Answer], truths: list[Truth]) -> Tensor:
        """Return the loss of the first stage, of the one-to-one and of the one-to-many queries of all layers."""
        config = self.config
        objects = objects_per_process(truths, first.logits.device)
        things = [{**truth, "class_labels": torch.zeros_like(truth["class_labels"])} for truth in truths]
        loss = self._proposal_loss([first], things, objects)
        loss = loss + self._loss([answer.part(slice(config.queries)) for answer in answers], truths, objects)
        if answers[0].boxes.shape[1] > config.queries:
            many = [answer.part(slice(config.queries, None)) for answer in answers]
            extra = self._loss(many, repeated(truths, config.repeats), config.repeats * objects)
            loss = loss + config.extra_weight * extra
        return loss


@torch.no_grad()
def detect(model: Detector, batch: AnnotatedBatch) -> list[Detections]:
    """Return the objects that ``model`` finds in each image of ``batch``; none where there is no image.

    A query may be reported more than once, for several classes, as in Deformable DETR; one that starts outside the
    image, because the image has too few positions for all, is not reported. The batch is one of an evaluation, whose
    targets contain the images' sizes.
    """
    weight = next(model.parameters())
    whole = torch.ones(2)
    valid = torch.stack([target.get("valid", whole).to(weight) for target in batch.targets])
    with evaluating(model):
        answer = model(batch.images.to(weight), valid=valid)
    assert isinstance(answer, Answer)
    sizes = [target.get("size") for target in batch.targets]
    return [
        _best(logits, boxes, size, model.config.detections)
        for logits, boxes, size in zip(answer.logits.float(), answer.boxes.float(), sizes, strict=True)
    ]


def look_forward_twice(deltas: Sequence[Tensor], reference: Tensor) -> list[Tensor]:
    """Return the boxes (B, Q, 4) after each layer, from what each layer adds to those before (before the sigmoid).

    box_i = sigmoid(delta_i + logit(box_{i-1})), in which the gradient also reaches delta_{i-1}, but nothing before it
    (Zhang et al., "DINO", 2022).
    """
    boxes = []
    for delta in deltas:
        boxes.append((delta + inverse_sigmoid(reference)).sigmoid())
        reference = (delta + inverse_sigmoid(reference.detach())).sigmoid()
    return boxes


class _Memory(NamedTuple):
    """The output of the encoder, all positions of all maps in a row."""

    features: Tensor
    """(B, N, width)."""
    is_seen: Tensor
    """(B, N): whether a position is part of the image."""
    shapes: list[tuple[int, int]]
    layout: dict[str, Any]
    """The arguments by which the library gets ``shapes``."""


def _library_config(config: DetectorConfig) -> DeformableDetrConfig:
    library = DeformableDetrConfig(
        d_model=config.width,
        encoder_layers=config.encoder_layers,
        decoder_layers=config.decoder_layers,
        encoder_attention_heads=config.heads,
        decoder_attention_heads=config.heads,
        encoder_ffn_dim=config.hidden,
        decoder_ffn_dim=config.hidden,
        encoder_n_points=config.points,
        decoder_n_points=config.points,
        num_feature_levels=config.maps + config.further_maps,
        dropout=config.dropout,
    )
    library._attn_implementation = "sdpa"  # it takes a boolean mask
    return library


def _projections(backbone: Backbone, config: DetectorConfig) -> nn.ModuleList:
    """Return the projections of the maps to the encoder's width; additional maps are computed from the last one."""
    channels = backbone.channels
    wide = [channels[-1], *[config.width] * config.further_maps]
    convolutions = [nn.Conv2d(one, config.width, 1) for one in channels]
    convolutions += [nn.Conv2d(one, config.width, 3, stride=2, padding=1) for one in wide[: config.further_maps]]
    groups = math.gcd(32, config.width // 2)  # 32, or fewer so that no group has only one channel
    for convolution in convolutions:
        nn.init.xavier_uniform_(convolution.weight)
        nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
    return nn.ModuleList(nn.Sequential(one, nn.GroupNorm(groups, config.width)) for one in convolutions)


def _places(backbone: Backbone, config: DetectorConfig) -> int:
    """Return how many positions the maps have for images of the backbone's own size."""
    strides = [*backbone.strides]
    strides += [strides[-1] * 2**step for step in range(1, config.further_maps + 1)]
    return sum(math.prod(math.ceil(side / stride) for side in backbone.input_size[1:]) for stride in strides)


def _check_places(queries: int, places: int, size: Sequence[int]) -> None:
    _require(
        queries <= places,
        f"{queries} queries need as many positions of the maps, but images of {size[0]} x {size[1]} have {places}; "
        "use larger images, or fewer queries and extra_queries",
    )


def _begin_(layers: nn.Module) -> None:
    """Initialise matrices by Glorot, as Deformable DETR does, where transformers uses a standard deviation of 0.02.

    Those of the sampling points keep their own values.
    """
    for name, parameter in layers.named_parameters():
        is_place = "sampling_offsets" in name or "attention_weights" in name
        if parameter.ndim > 1 and not is_place:
            nn.init.xavier_uniform_(parameter)


def _scores(width: int, classes: int) -> nn.Linear:
    layer = nn.Linear(width, classes)
    nn.init.constant_(layer.bias, math.log(PRIOR / (1 - PRIOR)))
    return layer


def _boxes(width: int) -> DeformableDetrMLPPredictionHead:
    head = DeformableDetrMLPPredictionHead(width, width, 4, 3)
    for parameter in head.layers[-1].parameters():
        nn.init.zeros_(parameter)
    return head


def _of_image(target: Target) -> Truth:
    """Return the objects of a target, with boxes relative to the image instead of the canvas."""
    height, width = target["valid"]
    return {"boxes": target["boxes"] / torch.stack([width, height, width, height]), "class_labels": target["labels"]}


def _seen(shape: tuple[int, int], valid: Tensor) -> Tensor:
    """Return which positions of a map are part of the image (B, h, w): those whose upper left corner is."""
    rows, columns = (torch.arange(side, device=valid.device) / side for side in shape)
    return (rows[None, :, None] < valid[:, 0, None, None]) & (columns[None, None, :] < valid[:, 1, None, None])


def _anchors(shapes: list[tuple[int, int]], valid: Tensor) -> Tensor:
    """Return a box (B, N, 4) around the center of each position of the maps, relative to the image."""
    found = []
    for level, (height, width) in enumerate(shapes):
        rows, columns = ((torch.arange(side, device=valid.device) + 0.5) / side for side in (height, width))
        middles = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), dim=-1).flatten(0, 1)  # (h w, 2)
        centres = middles / valid.flip(1)[:, None]
        found.append(torch.cat([centres, torch.full_like(centres, SMALLEST * 2**level)], dim=-1))
    return torch.cat(found, dim=1)


def _told(logits: Tensor, is_told: Tensor) -> Tensor:
    """Return the logits (B, N, classes), ``NEVER`` where ``is_told`` (B, N) does not hold."""
    return logits.masked_fill(~is_told[..., None], NEVER)


def _of_places(first: Answer, is_seen: Tensor) -> Answer:
    """Return the proposals with those outside the image disabled: they add no loss and match no object."""
    boxes = torch.where(is_seen[..., None], first.boxes, first.boxes.new_tensor(NOWHERE))
    return Answer(_told(first.logits, is_seen), boxes)


def _layout(shapes: list[tuple[int, int]], valid: Tensor) -> dict[str, Any]:
    sizes = torch.tensor(shapes, device=valid.device)
    counts = sizes.prod(1)
    return {
        "spatial_shapes": sizes,
        "spatial_shapes_list": shapes,
        "level_start_index": counts.cumsum(0) - counts,
        "valid_ratios": valid.flip(1)[:, None].expand(-1, len(shapes), -1),
    }


def _flat(maps: list[Tensor]) -> Tensor:
    return torch.cat([one.flatten(2).transpose(1, 2) for one in maps], dim=1)  # (B, N, width)


def _waves(boxes: Tensor, width: int) -> Tensor:
    """Return sines and cosines (B, Q, 4 width) of the four numbers of each box."""
    lengths = BASE ** (torch.arange(0, width, 2, device=boxes.device) / width)
    angles = 2 * math.pi * boxes[..., None] / lengths
    return torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(2)


def _best(logits: Tensor, boxes: Tensor, size: Tensor | None, most: int) -> Detections:
    """Return the ``most`` pairs of query and class with the highest scores; none if there is no image."""
    told = int((logits > NEVER).sum()) if size is not None else 0
    scores, best = logits.sigmoid().flatten().topk(min(most, told))
    if size is None:
        return Detections(boxes[:0], scores, best)
    centre, half = (part[best // logits.shape[1]] for part in (boxes[:, :2], boxes[:, 2:] / 2))
    scale = size.to(boxes).flip(0).repeat(2)
    return Detections(torch.cat([centre - half, centre + half], dim=1) * scale, scores, best % logits.shape[1])


def _require(is_so: bool, sentence: str) -> None:
    if not is_so:
        raise ModelError(sentence)
