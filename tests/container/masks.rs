//! Task masks: reading and writing bits, and malformed sections.

use super::raw::sample;
use super::{fixture, refusal};
use cmf_gpu::Kind;
use cmf_gpu::format::cmf::CmfContainer;
use cmf_gpu::source::{Mask, MaskAxis, MaskShape, Masks};
use serde_json::{Value, json};

const SHAPE: MaskShape = MaskShape {
    layers: 2,
    rows: 2,
    ffn: 12,
    heads: 3,
    experts: 5,
};

/// Two rows of neurons, two of heads, the layer gates, and two rows of experts.
const BLOB: [u8; 9] = [0x01, 0x08, 0xFF, 0x0F, 0b101, 0b111, 0b10, 0b00001, 0b11111];
const WITHOUT_EXPERTS: usize = 7;

fn meta() -> Value {
    json!({"default_task": "a", "masks": [
        {"task_id": 0, "name": "a", "description": "first", "sparsity": 0.25, "quality": null, "parent": null,
         "priority": "Fallback", "has_hot_pack": false, "blob_off": 512, "blob_len": 7},
        {"task_id": 7, "name": "b", "has_expert_fields": true, "blob_off": 520, "blob_len": 9, "extra": [1]},
    ]})
}

/// A hand-made section with bits at 512 and 520.
fn section(meta: &str, count: u32) -> Vec<u8> {
    let mut section = [count.to_le_bytes(), (meta.len() as u32).to_le_bytes()].concat();
    section.extend_from_slice(meta.as_bytes());
    section.resize(512, 0);
    section.extend_from_slice(&BLOB[..WITHOUT_EXPERTS]);
    section.resize(520, 0);
    section.extend_from_slice(&BLOB);
    section
}

#[test]
fn bits_are_where_the_format_puts_them() {
    let masks = Masks::parse(&section(&meta().to_string(), 2), SHAPE).unwrap();
    let (a, b) = (&masks.masks[0], masks.find("b").unwrap());
    for mask in [a, b] {
        let on = |layer: usize| {
            (0..12)
                .filter(|&neuron| mask.unit(MaskAxis::Neurons, layer, neuron))
                .collect::<Vec<_>>()
        };
        assert_eq!(on(0), [0, 11]);
        assert_eq!(on(1), (0..12).collect::<Vec<_>>());
        assert_eq!(
            [0, 1, 2].map(|head| mask.unit(MaskAxis::Heads, 0, head)),
            [true, false, true]
        );
        assert_eq!(
            (
                mask.count(MaskAxis::Neurons, 0),
                mask.count(MaskAxis::Heads, 0),
                mask.count(MaskAxis::Heads, 1)
            ),
            (2, 2, 3)
        );
        assert_eq!([0, 1].map(|layer| mask.layer(layer)), [false, true]);
        assert_eq!(
            (mask.bits(MaskAxis::Neurons, 0), mask.bits(MaskAxis::Heads, 0)),
            (Some(&BLOB[..2]), Some(&BLOB[4..5]))
        );
        assert!(!mask.is_open());
        // The layer of a draft head and a neuron out of range are not restricted.
        assert!(
            mask.layer(2)
                && mask.unit(MaskAxis::Neurons, 0, 12)
                && mask.unit(MaskAxis::Heads, 0, 3)
                && mask.unit(MaskAxis::Experts, 0, 5)
        );
    }
    assert!(
        (0..5).all(|expert| a.unit(MaskAxis::Experts, 0, expert))
            && !a.has_experts()
            && a.count(MaskAxis::Experts, 0) == 5
    );
    assert_eq!(
        (0..5)
            .filter(|&expert| b.unit(MaskAxis::Experts, 0, expert))
            .collect::<Vec<_>>(),
        [0]
    );
    assert_eq!(
        (
            b.count(MaskAxis::Experts, 0),
            b.count(MaskAxis::Experts, 1),
            b.bits(MaskAxis::Experts, 1)
        ),
        (1, 5, Some(&BLOB[8..]))
    );
    assert_eq!(
        (a.sparsity, a.description.as_deref(), &a.quality),
        (Some(0.25), Some("first"), &None)
    );
    assert_eq!(
        (a.other["priority"].as_str(), b.other["extra"][0].as_u64()),
        (Some("Fallback"), Some(1))
    );
    assert_eq!(masks.default_mask().map(|mask| mask.task_id), Some(0));
    let err = masks.find("c").unwrap_err();
    assert!(
        err.kind == Kind::Usage && err.message.contains("existing tasks: a, b"),
        "{err}"
    );
    let err = Masks::default().find("c").unwrap_err();
    assert_eq!(err.message, "no task 'c': the model has no tasks");
}

#[test]
fn written_masks_are_read_back() {
    let parsed = Masks::parse(&section(&meta().to_string(), 2), SHAPE).unwrap();
    let bytes = parsed.to_bytes().unwrap();
    assert_eq!(Masks::parse(&bytes, SHAPE).unwrap(), parsed);
    assert_eq!(
        Masks::default()
            .to_bytes()
            .and_then(|bytes| Masks::parse(&bytes, SHAPE)),
        Ok(Masks::default())
    );

    let mut mask = Mask::open(1, "open", SHAPE);
    assert!(mask.is_open());
    mask.set_unit(MaskAxis::Experts, 0, 0, true).unwrap();
    assert!(mask.is_open() && mask.has_experts(), "all experts on restrict nothing");
    mask.set_unit(MaskAxis::Neurons, 1, 3, false).unwrap();
    mask.set_unit(MaskAxis::Heads, 0, 2, false).unwrap();
    mask.set_layer(1, false).unwrap();
    mask.set_unit(MaskAxis::Experts, 1, 4, false).unwrap();
    assert_eq!(
        (
            mask.count(MaskAxis::Neurons, 1),
            mask.count(MaskAxis::Heads, 0),
            mask.layer(1),
            mask.unit(MaskAxis::Experts, 1, 4)
        ),
        (11, 2, false, false)
    );
    for err in [
        mask.set_unit(MaskAxis::Neurons, 0, 12, true),
        mask.set_unit(MaskAxis::Heads, 0, 3, true),
        mask.set_layer(2, true),
        mask.set_unit(MaskAxis::Experts, 0, 5, true),
    ] {
        assert_eq!(err.unwrap_err().kind, Kind::Usage);
    }
    let masks = |mask: &Mask| Masks {
        default_task: None,
        masks: vec![mask.clone()],
    };
    assert_eq!(
        Masks::parse(&masks(&mask).to_bytes().unwrap(), SHAPE).unwrap(),
        masks(&mask)
    );
    (0..5).for_each(|expert| mask.set_unit(MaskAxis::Experts, 1, expert, false).unwrap());
    assert_eq!(masks(&mask).to_bytes().unwrap_err().kind, Kind::Usage);
    let named = |name: &str| masks(&Mask::open(0, name, SHAPE)).to_bytes().is_ok();
    assert!(named("täsk/1") && !named("") && !named("none") && !named("a\n") && !named(&"x".repeat(257)));
}

#[test]
fn loops_can_have_rows_of_their_own() {
    let shape = MaskShape { rows: 6, ..SHAPE };
    let mut mask = Mask::open(0, "m", shape);
    mask.set_unit(MaskAxis::Neurons, 2 * 2 + 1, 5, false).unwrap();
    mask.set_layer(0, false).unwrap();
    let bytes = Masks {
        default_task: None,
        masks: vec![mask],
    };
    let bytes = bytes.to_bytes().unwrap();
    // 6 rows of 2 and 1 bytes, and one byte of layer gates.
    assert!(std::str::from_utf8(&bytes[8..]).is_err() && String::from_utf8_lossy(&bytes).contains("\"blob_len\":19"));
    let masks = Masks::parse(&bytes, shape).unwrap();
    let off: Vec<usize> = (0..6)
        .filter(|&visit| !masks.masks[0].unit(MaskAxis::Neurons, visit, 5))
        .collect();
    assert_eq!(off, [5], "layer 1 of the last of three passes");
    assert!(!masks.masks[0].layer(0));
    // Without rows for each loop, every loop reads the row of its layer.
    let plain = Masks::parse(&section(&meta().to_string(), 2), SHAPE).unwrap();
    assert_eq!(
        plain.masks[0].count(MaskAxis::Neurons, 2),
        plain.masks[0].count(MaskAxis::Neurons, 0)
    );
    assert!(
        Masks::parse(&bytes, SHAPE).is_err(),
        "rows of passes where layers are expected"
    );
}

/// What is wrong with a section, the section, and its error.
type Case<'a> = (&'a str, Vec<u8>, Kind, &'a str);

fn are_refused(cases: impl IntoIterator<Item = Case<'static>>) {
    for (what, section, kind, says) in cases {
        let err = Masks::parse(&section, SHAPE).expect_err(what);
        assert!(err.kind == kind && err.message.contains(says), "{what}: {err}");
    }
}

/// The section after a change of its description.
fn described(change: fn(&mut Value)) -> Vec<u8> {
    let mut meta = meta();
    change(&mut meta);
    section(&meta.to_string(), 2)
}

#[test]
fn malformed_descriptions_are_refused() {
    let good = section(&meta().to_string(), 2);
    Masks::parse(&good, SHAPE).unwrap();
    are_refused([
        ("nothing", Vec::new(), Kind::Bounds, "at least 8 bytes"),
        ("7 bytes", good[..7].to_vec(), Kind::Bounds, "at least 8 bytes"),
        (
            "4 billion masks",
            section(&meta().to_string(), u32::MAX),
            Kind::Parse,
            "count of 4294967295",
        ),
        (
            "one mask less",
            section(&meta().to_string(), 1),
            Kind::Parse,
            "count of 1 masks and describes 2",
        ),
        (
            "long meta",
            [2u32.to_le_bytes(), u32::MAX.to_le_bytes()].concat(),
            Kind::Bounds,
            "too short for a description of 4294967295",
        ),
        ("no JSON", section("{", 2), Kind::Parse, "masks: EOF"),
        (
            "deep JSON",
            section(&"[".repeat(400), 2),
            Kind::Parse,
            "recursion limit",
        ),
        ("an array", section("[]", 0), Kind::Parse, "expected an object"),
        (
            "masks of another type",
            described(|m| m["masks"] = json!({})),
            Kind::Parse,
            "masks: invalid type",
        ),
        (
            "no name",
            described(|m| m["masks"][0]["name"] = json!(null)),
            Kind::Parse,
            "missing field `name`",
        ),
        (
            "empty name",
            described(|m| m["masks"][0]["name"] = json!("")),
            Kind::Parse,
            "task name ''",
        ),
        (
            "reserved name",
            described(|m| m["masks"][0]["name"] = json!("none")),
            Kind::Parse,
            "task name 'none'",
        ),
        (
            "control characters",
            described(|m| m["masks"][0]["name"] = json!("\u{1b}[2J")),
            Kind::Parse,
            "\\u{1b}[2J",
        ),
        (
            "names twice",
            described(|m| m["masks"][0]["name"] = json!("b")),
            Kind::Parse,
            "two masks are named 'b'",
        ),
        (
            "ids twice",
            described(|m| m["masks"][0]["task_id"] = json!(7)),
            Kind::Parse,
            "two masks have task_id 7",
        ),
        (
            "negative id",
            described(|m| m["masks"][0]["task_id"] = json!(-1)),
            Kind::Parse,
            "invalid value",
        ),
    ]);
}

#[test]
fn malformed_bits_are_refused() {
    let good = section(&meta().to_string(), 2);
    let byte = |at: usize, value: u8| {
        let mut section = good.clone();
        section[at] = value;
        section
    };
    are_refused([
        (
            "sparsity",
            described(|m| m["masks"][0]["sparsity"] = json!(1.5)),
            Kind::Parse,
            "sparsity is",
        ),
        (
            "a byte short",
            described(|m| m["masks"][0]["blob_len"] = json!(6)),
            Kind::Parse,
            "6 bytes of bits, expected 7",
        ),
        (
            "a byte long",
            described(|m| m["masks"][0]["blob_len"] = json!(8)),
            Kind::Parse,
            "8 bytes of bits, expected 7",
        ),
        (
            "huge",
            described(|m| m["masks"][0]["blob_len"] = json!(u64::MAX)),
            Kind::Parse,
            "bytes of bits, expected 7",
        ),
        (
            "odd offset",
            described(|m| m["masks"][0]["blob_off"] = json!(513)),
            Kind::Bounds,
            "a multiple of 8",
        ),
        (
            "past the end",
            described(|m| m["masks"][0]["blob_off"] = json!(528)),
            Kind::Bounds,
            "the masks section has 529",
        ),
        (
            "far away",
            described(|m| m["masks"][0]["blob_off"] = json!(u64::MAX - 7)),
            Kind::Bounds,
            "the masks section has",
        ),
        (
            "over the JSON",
            described(|m| m["masks"][0]["blob_off"] = json!(8)),
            Kind::Bounds,
            "overlap",
        ),
        (
            "over the head",
            described(|m| m["masks"][0]["blob_off"] = json!(0)),
            Kind::Bounds,
            "overlap",
        ),
        (
            "one over the other",
            described(|m| m["masks"][0]["blob_off"] = json!(520)),
            Kind::Bounds,
            "overlap",
        ),
        (
            "experts missing",
            described(|m| m["masks"][0]["has_expert_fields"] = json!(true)),
            Kind::Parse,
            "expected 9",
        ),
        (
            "experts ignored",
            described(|m| m["masks"][1]["has_expert_fields"] = json!(false)),
            Kind::Parse,
            "expected 7",
        ),
        (
            "phantom neuron",
            byte(513, 0x18),
            Kind::Parse,
            "mask 'a': neurons of row 0: a bit past the last of 12",
        ),
        (
            "phantom head",
            byte(525, 0b1111),
            Kind::Parse,
            "mask 'b': heads of row 1: a bit past the last of 3",
        ),
        (
            "phantom layer",
            byte(518, 0b100),
            Kind::Parse,
            "layer gates of row 0: a bit past the last of 2",
        ),
        (
            "phantom expert",
            byte(528, 0x20),
            Kind::Parse,
            "experts of row 1: a bit past the last of 5",
        ),
        (
            "no expert",
            byte(527, 0),
            Kind::Parse,
            "experts of row 0: all are switched off",
        ),
        ("cut", good[..528].to_vec(), Kind::Bounds, "the masks section has 528"),
    ]);
    let dense = MaskShape { experts: 0, ..SHAPE };
    let err = Masks::parse(&good, dense).unwrap_err();
    assert!(err.message.contains("the network has none"), "{err}");
    // No truncation and no flipped bit causes a panic.
    for len in 0..good.len() {
        assert!(Masks::parse(&good[..len], SHAPE).is_err(), "{len} bytes");
    }
    for bit in 0..8 * good.len() {
        let mut flipped = good.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        let _ = Masks::parse(&flipped, SHAPE);
    }
}

#[test]
fn a_file_with_a_malformed_section_is_refused() {
    let raw = |masks: Vec<u8>| sample().with(|raw| raw.masks = masks).build();
    let err = refusal(&raw(section(&meta().to_string(), 2))).unwrap();
    assert!(
        err.kind == Kind::Parse && err.message.contains("bytes of bits"),
        "of another network: {err}"
    );
    assert_eq!(refusal(&raw(vec![0; 4])).unwrap().kind, Kind::Bounds);
}

#[test]
fn masks_of_another_writer() {
    let container = CmfContainer::open(&fixture("interop/qwen2-q8_row-densemasks.cmf")).unwrap();
    let section = container.masks_section().unwrap();
    let masks = container.masks().unwrap();
    let names: Vec<&str> = masks.masks.iter().map(|mask| mask.name.as_str()).collect();
    assert_eq!(names, ["general", "narrow"]);
    assert_eq!(masks.default_mask().map(|mask| mask.name.as_str()), Some("general"));
    for (mask, start) in masks.masks.iter().zip([616, 680]) {
        for layer in 0..3 {
            for neuron in 0..160 {
                let bit = section[start + layer * 20 + neuron / 8] >> (neuron % 8) & 1 == 1;
                assert_eq!(mask.unit(MaskAxis::Neurons, layer, neuron), bit);
            }
            for head in 0..3 {
                assert_eq!(
                    mask.unit(MaskAxis::Heads, layer, head),
                    section[start + 60 + layer] >> head & 1 == 1
                );
            }
            assert_eq!(mask.layer(layer), section[start + 63] >> layer & 1 == 1);
        }
    }
    let narrow = masks.find("narrow").unwrap();
    assert_eq!(
        [0, 1, 2].map(|layer| narrow.count(MaskAxis::Neurons, layer)),
        [88, 80, 82]
    );
    assert_eq!([0, 1, 2].map(|layer| narrow.layer(layer)), [true, false, true]);
    assert_eq!(narrow.quality.as_ref().unwrap()["value"], 0.97);
    assert_eq!(
        Masks::parse(&masks.to_bytes().unwrap(), narrow.shape()).as_ref(),
        Ok(masks)
    );

    let index = container.index().unwrap();
    assert_eq!(index.len(), 5);
    assert_eq!((index[3].task_id, index[3].layer), (1, 0));
    assert_eq!(
        (index[3].groups.as_slice(), index[3].heads.as_slice()),
        (&[0, 1, 2, 3, 4][..], &[0, 1][..])
    );
}

#[test]
fn a_malformed_index_is_refused() {
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    // Two groups (0 and 3) and heads 1 and 3, in task 5, layer 1.
    let entry = |layer: u32| [words(&[5, layer, 2, 2]), vec![0, 0, 3, 0, 1, 3], vec![0; 2]].concat();
    let section = |count: u32, entries: &[Vec<u8>]| [words(&[count, 0]), entries.concat()].concat();
    let opened = |index: Vec<u8>| refusal(&sample().with(|raw| raw.index = index).build());
    for good in [
        section(0, &[]),
        section(1, &[entry(1)]),
        section(2, &[entry(1), entry(0)]),
    ] {
        assert_eq!(opened(good), Err("was opened".into()));
    }
    let with = |at: usize, value: u8| {
        let mut index = section(1, &[entry(1)]);
        index[at] = value;
        index
    };
    let cases = [
        (vec![0; 7], Kind::Bounds),
        (section(u32::MAX, &[]), Kind::Bounds),
        (section(2, &[entry(1)]), Kind::Bounds),
        (section(0, &[entry(1)]), Kind::Parse),
        (section(2, &[entry(1), entry(1)]), Kind::Parse),
        (with(12, 2), Kind::Parse),
        (with(26, 4), Kind::Parse),
        (with(26, 0), Kind::Parse),
        (with(29, 4), Kind::Parse),
        (with(29, 1), Kind::Parse),
        (with(16, 200), Kind::Bounds),
        (
            [words(&[1, 0, 5, 1, u32::MAX, u32::MAX]), vec![0; 16]].concat(),
            Kind::Bounds,
        ),
        (section(1, &[entry(1), vec![0; 4]]), Kind::Parse),
    ];
    for (i, (index, kind)) in cases.into_iter().enumerate() {
        assert_eq!(opened(index).map(|err| err.kind), Ok(kind), "case {i}");
    }
}
