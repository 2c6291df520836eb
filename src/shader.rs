//! Puts the WGSL of a pipeline together: generated constants, library, weight type, operator. Plain concatenation; no
//! device here.

use crate::dtype::planes::{NO_ENTRY, Planes};
use crate::kernel::{Kernel, Kv, Team, Variant};

/// Workgroups in one row of a folded grid.
pub const GRID_WIDTH: u32 = 32768;

macro_rules! files {
    ($dir:literal: $($stem:literal)*) => {
        &[$(($stem, include_str!(concat!("../shaders/", $dir, "/", $stem, ".wgsl")))),*]
    };
}

const LIB: &[(&str, &str)] = files!("lib": "attention" "attention_chunk" "attention_merge" "canon" "columns_apart" "columns_near" "ctl" "every_unit" "experts" "gate" "glu" "grid" "kv_f16" "kv_f32" "listed" "matmul"
    "matmul_pair" "matmul_tile" "matvec" "moe_gated" "moe_tile" "norm_scale" "parts" "route" "routes" "team_subgroup" "team_tree" "tile_every" "tile_listed" "vector" "weights");
const DTYPE: &[(&str, &str)] = files!("dtype": "bf16" "bits1_codes" "bits2_codes" "bits_n" "f16" "f32" "group"
    "group_overlay" "group_words" "i8" "i8_codes" "i8_col" "nib4_codes" "nib4_flat" "nib4_ladder" "no_overlay" "wide16");
const OP: &[(&str, &str)] = files!("op": "add_norm" "attn_block" "attn_block_some" "attn_chunk" "attn_chunk_some" "attn_merge" "attn_merge_some" "cap" "delta_net" "draft" "embed" "glu" "last_column" "matmul" "matmul_add" "matmul_add_some" "matmul_glu" "matmul_glu_some" "matmul_some"
    "matvec" "matvec_add" "matvec_add_some" "matvec_glu" "matvec_glu_some" "matvec_some" "moe_combine" "moe_count" "moe_down" "moe_glu" "moe_lists" "moe_matmul" "moe_matmul_glu" "moe_matmul_up" "moe_matvec"
    "moe_route" "norm" "prep" "rope" "round_begin" "sample" "silence");

/// Text of one file; the tables and the catalogue are held together by the test below.
fn file(table: &'static [(&'static str, &'static str)], stem: &str) -> &'static str {
    table
        .iter()
        .find(|(name, _)| *name == stem)
        .map_or("", |(_, text)| text)
}

/// The WGSL of one pipeline.
pub fn compose(variant: &Variant) -> String {
    let row = variant.kernel.row();
    let mut text = format!("// {}\nconst THREADS: u32 = {}u;\n", variant.name(), variant.threads());
    let mut add = |part: &str| {
        text.push('\n');
        text.push_str(part);
    };
    add(&format!(
        "const HALF_NATIVE: bool = {};\nconst GRID_WIDTH: u32 = {GRID_WIDTH}u;\nconst KEEPS_ROWS: bool = {};\n",
        variant.half_native,
        // Gate and up are eight rows a thread: there are no registers for what all units of a row share.
        !matches!(
            variant.kernel,
            Kernel::MatmulGlu | Kernel::MatmulGluSome | Kernel::MoeMatmulGlu
        )
    ));
    if let Some(team) = variant.team {
        let (lanes, teams) = (team.lanes(), team.teams());
        add(&format!(
            "const LANES: u32 = {lanes}u;\nconst TEAMS: u32 = {teams}u;\nconst TEAM_THREADS: u32 = THREADS;\nconst COLS: u32 = {}u;\n",
            variant.columns
        ));
        add(match team {
            Team::Subgroup { .. } => file(LIB, "team_subgroup"),
            Team::Tree => file(LIB, "team_tree"),
        });
    }
    match variant.kv {
        Some(Kv::F16) => add(file(LIB, "kv_f16")),
        Some(Kv::F32) => add(file(LIB, "kv_f32")),
        None => {}
    }
    for lib in row.libs {
        add(file(LIB, lib));
        if *lib == "matvec" {
            // Two columns' sums fit into registers beside everything else.
            add(file(
                LIB,
                if variant.columns > 2 {
                    "columns_apart"
                } else {
                    "columns_near"
                },
            ));
        }
    }
    if let Some(planes) = variant.planes {
        if planes.has_overlay() {
            // The value of an entry that changes nothing.
            add(&format!("const NO_VALUE: u32 = {}u;\n", NO_ENTRY >> 16));
        }
        for stem in planes.shaders() {
            add(file(DTYPE, stem));
        }
    }
    add(file(OP, row.stem));
    text
}

/// Every variant that can be asked for: kernels × weight planes × cache types × teams × columns × decoders of halves.
pub fn all_variants() -> Vec<Variant> {
    let teams = [4, 8, 16, 32]
        .map(|lanes| Team::Subgroup { lanes })
        .into_iter()
        .chain([Team::Tree]);
    let mut all = Vec::new();
    for kernel in Kernel::ALL {
        let row = kernel.row();
        let planes: Vec<_> = if row.weights {
            Planes::ALL.map(Some).to_vec()
        } else {
            vec![None]
        };
        let kvs = if row.kv {
            vec![Some(Kv::F16), Some(Kv::F32)]
        } else {
            vec![None]
        };
        let teams: Vec<_> = if row.threads.is_none() {
            teams.clone().map(Some).collect()
        } else {
            vec![None]
        };
        let widths: &[u32] = if kernel.is_wide() { &[1, 2, 4, 8] } else { &[1] };
        for &planes in &planes {
            for &kv in &kvs {
                for (&team, &columns) in teams
                    .iter()
                    .flat_map(|team| widths.iter().map(move |width| (team, width)))
                {
                    let halves: &[bool] = if planes.is_some_and(Planes::has_halves) {
                        &[true, false]
                    } else {
                        &[true]
                    };
                    all.extend(halves.iter().map(|&half_native| Variant {
                        kernel,
                        planes,
                        kv,
                        team,
                        columns,
                        half_native,
                    }));
                }
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_named_file_exists_and_every_file_is_named() {
        let named = |dir: &str, table: &[(&str, &str)]| {
            let mut found: Vec<String> = std::fs::read_dir(format!("{}/shaders/{dir}", env!("CARGO_MANIFEST_DIR")))
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            found.sort();
            assert_eq!(
                found,
                table.iter().map(|(stem, _)| format!("{stem}.wgsl")).collect::<Vec<_>>()
            );
        };
        named("lib", LIB);
        named("dtype", DTYPE);
        named("op", OP);
        for kernel in Kernel::ALL {
            let row = kernel.row();
            assert!(!file(OP, row.stem).is_empty());
            assert!(row.libs.iter().all(|lib| !file(LIB, lib).is_empty()));
        }
        for planes in Planes::ALL {
            assert!(planes.shaders().iter().all(|stem| !file(DTYPE, stem).is_empty()));
        }
    }
}
