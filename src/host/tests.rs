//! A graph of two steps, with results computed by hand.

use super::*;
use crate::dtype::Dtype;
use crate::graph::{Bind, Buffer, Condition, Fill, Masked, Matrix, Piece, Program, Stacking, Step, Vector};
use crate::op::{Kv, Op, Token, batch_words, matvec, pre_norm};
use crate::source::MemoryTensors;

const COLS: usize = 64;
const ROWS: usize = 8;
/// The buffers.
const BATCH: BufferId = 0;
const H: BufferId = 1;
const X_SCALED: BufferId = 2;
const SQUARES: BufferId = 3;
const LIST: BufferId = 4;
const Y: BufferId = 5;
/// Turns the mask of the second step on.
const MASKED: usize = 0;
/// Leaves out the second step.
const LEFT_OUT: usize = 1;

const ONE_TOKEN: BatchShape = BatchShape { tokens: 1, end: 1 };

/// h = 2 everywhere, g = 1/2, w[r][k] = r + 1 for the first 32 columns and 10 (r + 1) for the others.
fn tensors() -> Arc<dyn Tensors> {
    let weight = |i: usize| (i / COLS + 1) as f32 * if i % COLS < 32 { 1.0 } else { 10.0 };
    let bytes = |values: Vec<f32>| bytemuck::cast_slice(&values).to_vec();
    let w = bytes((0..ROWS * COLS).map(weight).collect());
    let g = bytes(vec![0.5; COLS]);
    let tensors = [
        ("w".to_string(), Dtype::F32, vec![ROWS as u64, COLS as u64], w),
        ("g".to_string(), Dtype::F32, vec![COLS as u64], g),
    ];
    Arc::new(MemoryTensors::new(tensors).unwrap())
}

fn step(label: &str, op: Op, bindings: impl Into<Vec<Bind>>) -> Step {
    Step {
        label: label.into(),
        op,
        planes: None,
        bindings: bindings.into(),
        width: 1,
        conditions: Vec::new(),
        masked: None,
    }
}

fn graph(tensors: &dyn Tensors) -> Graph {
    let buffer = |(label, words): (&str, u64)| Buffer {
        label: label.into(),
        bytes: words * 4,
        fill: Fill::Zero,
    };
    let vector = |label: &str, tensor| Vector {
        label: label.into(),
        pieces: vec![Piece { tensor, len: COLS }],
        add: 0.0,
    };
    let (x, squares) = (Bind::Buffer(X_SCALED), Bind::Buffer(SQUARES));
    let norm = pre_norm::Bindings {
        batch: Bind::Buffer(BATCH),
        source: Bind::Buffer(H),
        g: Bind::Vector(0),
        x_scaled: x,
        squares,
    };
    let product = matvec::Bindings {
        w: Bind::Weight(0, 0),
        x,
        squares,
        list: Bind::Buffer(LIST),
        bias: Bind::Vector(1),
        y: Bind::Buffer(Y),
    };
    let product_params = matvec::Params {
        rows: ROWS as u32,
        groups: COLS as u32 / 32,
        second_row: u32::MAX,
        third_row: u32::MAX,
        square_vectors: COLS as u32 / 16,
        inv_cols: 1.0 / COLS as f32,
        y_stride: ROWS as u32 / 4,
        ..matvec::Params::default()
    };
    let norm_params = pre_norm::Params {
        vectors: COLS as u32 / 4,
    };
    let matrix = Matrix::stack("w".into(), &[0], Stacking::Rows, tensors, 1 << 20).unwrap();
    let norm = step("norm", norm_params.into(), norm);
    let product = Step {
        planes: Some(matrix.planes),
        conditions: vec![Condition {
            switch: LEFT_OUT,
            on: false,
        }],
        masked: Some(Masked {
            switch: MASKED,
            list: LIST,
        }),
        ..step("product", product_params.into(), product)
    };
    let buffers = [
        ("batch", 8),
        ("h", 64),
        ("x_scaled", 64),
        ("squares", 32),
        ("list", 8),
        ("y", 16),
    ];
    Graph {
        buffers: buffers.map(buffer).into(),
        matrices: vec![matrix],
        vectors: vec![vector("g", Some(1)), vector("zeros", None)],
        programs: vec![Program {
            name: "test",
            steps: vec![norm, product],
            ..Program::default()
        }],
        readback: Y,
        kv: Kv::F32,
        width: 1,
        routed: Vec::new(),
        paged: Vec::new(),
    }
}

/// An executor whose only token has h = 2 everywhere.
fn executor(selection: Selection) -> HostExecutor {
    let tensors = tensors();
    let graph = Arc::new(graph(&*tensors));
    let mut executor = HostExecutor::new(graph, Arc::new(selection), tensors).unwrap();
    executor.write(BATCH, &batch_words(&[Token::default()])).unwrap();
    executor.write(H, &[2f32.to_bits(); COLS]).unwrap();
    executor
}

/// Runs the program and returns the 8 outputs.
fn outputs(executor: &mut HostExecutor) -> Vec<f32> {
    let ticket = executor.submit(0, 0..2, ONE_TOKEN).unwrap();
    let words = executor.wait(ticket).unwrap();
    words[..ROWS].iter().map(|&word| f32::from_bits(word)).collect()
}

/// Only block 1 of 4 rows and group 1 of 32 columns.
fn masked(on: bool) -> Selection {
    Selection {
        on: vec![on],
        contents: vec![(LIST, vec![1, 1, 5, 0, 1, 1, 0])],
        ..Selection::default()
    }
}

#[test]
fn two_steps_compute_a_norm_and_a_product() {
    let mut executor = executor(Selection::default());
    // x_scaled = 1; the mean of squares is 4, so the norm divides the sums (r + 1) (32 + 320) by 2.
    let expected: Vec<f32> = (1..=8).map(|r| 176.0 * r as f32).collect();
    assert_eq!(outputs(&mut executor), expected);
    assert_eq!(executor.read(X_SCALED, 62, 2).unwrap(), [1f32.to_bits(); 2]);
    assert_eq!(executor.read(SQUARES, 15, 2).unwrap(), [16f32.to_bits(), 0]);
}

#[test]
fn a_selection_masks_a_step_and_leaves_out_another() {
    let mut executor = executor(masked(true));
    let groups: Vec<f32> = (1..=8).map(|r| if r > 4 { 160.0 * r as f32 } else { 0.0 }).collect();
    assert_eq!(outputs(&mut executor), groups);
    executor.select(Arc::new(masked(false))).unwrap();
    assert_eq!(outputs(&mut executor)[0], 176.0);
    let left_out = Selection {
        on: vec![true, true],
        ..Selection::default()
    };
    executor.select(Arc::new(left_out)).unwrap();
    executor.write(Y, &[7; 16]).unwrap();
    let before = executor.counters();
    let ticket = executor.submit(0, 0..2, ONE_TOKEN).unwrap();
    assert_eq!(executor.wait(ticket).unwrap(), [7; 16]);
    assert_eq!(executor.counters().since(&before).dispatches, 1);
}

#[test]
fn a_range_runs_those_steps_and_the_last_one_counts_the_bytes() {
    let mut executor = executor(masked(true));
    executor.run(0, 0..1, ONE_TOKEN).unwrap();
    assert_eq!(executor.read(Y, 0, 16).unwrap(), [0; 16]);
    executor.submit(0, 0..1, ONE_TOKEN).unwrap();
    assert_eq!(
        (executor.counters().dispatches, executor.counters().weight_bytes),
        (2, 0)
    );
    let second = executor.submit(0, 1..2, ONE_TOKEN).unwrap();
    // The vector of the first step (the bias of the second is zero), and a quarter of the weight.
    let vectors = COLS as u64 * 4;
    let weight = (ROWS * COLS) as u64 * 4 / 4;
    assert_eq!(executor.counters().weight_bytes, vectors + weight);
    assert_eq!(executor.wait(second).unwrap_err().kind, Kind::Internal);
}

#[test]
fn faults_of_a_graph_are_internal_errors() {
    let mut executor = executor(Selection::default());
    let faults = [
        executor.run(1, 0..1, ONE_TOKEN),
        executor.run(0, 1..3, ONE_TOKEN),
        executor.write(6, &[0]),
        executor.write(Y, &[0; 17]),
        executor.read(Y, 16, 1).map(|_| ()),
    ];
    for fault in faults {
        assert_eq!(fault.unwrap_err().kind, Kind::Internal);
    }
}
