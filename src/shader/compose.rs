//! Composes the WGSL of a pipeline: generated declarations, then the files that the operator imports, then the
//! operator.
//!
//! A line `#import name` names a file in `shaders/lib`, or stands for files that depend on the variant: `dtype`,
//! `kv`, `team`, `share`, `tokens_side_by_side`, `groups`. A line `#each 0..4 text` is repeated, with a number
//! in place of every `#`. Everything else is plain concatenation.

use super::variant::{Team, Variant};
use crate::op::{Kernel, constants};

macro_rules! files {
    ($dir:literal: $($stem:literal)*) => {
        &[$(($stem, include_str!(concat!("../../shaders/", $dir, "/", $stem, ".wgsl")))),*]
    };
}

/// The files of `shaders/lib`; a test below compares the table with the directory.
const LIB: &[(&str, &str)] = files!("lib":
    "attention" "attention_sums" "canon" "experts" "frame" "gate" "glu" "grid" "groups_all" "groups_masked" "kv_f16" "kv_f32"
    "matmul" "matmul_tile" "matvec" "matvec_registers" "matvec_spilled" "moe_gated" "moe_tile" "norm_scale" "route" "routes"
    "run_groups" "share_none" "share_subgroup" "stacked" "team_subgroup" "team_tree" "tokens" "vector" "weights" "workgroup_sum");

/// The files that an import stands for in a variant.
fn resolve(variant: &Variant, import: &str) -> Vec<(&'static str, &'static str)> {
    let lib = |stem: &str| LIB.iter().filter(|(name, _)| *name == stem).copied().collect();
    match import {
        "dtype" => variant.planes.map_or(&[][..], |planes| planes.shaders()).to_vec(),
        "kv" => lib(&format!("kv_{}", variant.kv.map_or("f32", |kv| kv.name()))),
        "share" if variant.team == Some(Team::SHARING) => lib("share_subgroup"),
        "share" => lib("share_none"),
        "team" if variant.team == Some(Team::Tree) => lib("team_tree"),
        "team" => lib("team_subgroup"),
        // The sums of up to two tokens fit into registers.
        "tokens_side_by_side" if variant.width > 2 => lib("matvec_spilled"),
        "tokens_side_by_side" => lib("matvec_registers"),
        "groups" if variant.masked => lib("groups_masked"),
        "groups" => lib("groups_all"),
        stem => lib(stem),
    }
}

fn imports(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .filter_map(|line| line.strip_prefix("#import "))
        .map(str::trim)
}

/// The WGSL of one pipeline.
pub fn compose(variant: &Variant) -> String {
    let spec = variant.kernel.spec();
    let mut text = format!("// {}\n{}", variant.name(), constants::declarations());
    // Gate and up are eight rows for each thread. Then no registers are left for values of a row that its groups share.
    let keeps_rows = !matches!(variant.kernel, Kernel::MatmulGlu | Kernel::MoeMatmulGlu);
    text += &format!(
        "const THREADS: u32 = {}u;\nconst LANES: u32 = {}u;\nconst TEAMS: u32 = {}u;\nconst WIDTH: u32 = {}u;\n\
         const MASKED: bool = {};\nconst HALF_NATIVE: bool = {};\nconst KEEPS_ROWS: bool = {keeps_rows};\n",
        variant.threads(),
        variant.team.map_or(1, Team::lanes),
        variant.teams(),
        variant.width,
        variant.masked,
        variant.half_native,
    );
    text += &spec.declarations();
    let mut files = Vec::new();
    collect(variant, (spec.name, spec.text), &mut files);
    for (_, file) in files {
        text.push('\n');
        for line in file.lines().filter(|line| !line.starts_with("#import ")) {
            repeat(line, variant.width, &mut text);
        }
    }
    text
}

/// Adds a line, or if it begins with `#each FIRST..END`, what follows once for each number of the range. `END` is a
/// number or `WIDTH`.
fn repeat(line: &str, width: u32, text: &mut String) {
    let parts = line.split_once("#each ").and_then(|(indent, rest)| {
        let (range, repeated) = rest.split_once(' ')?;
        let (first, end) = range.split_once("..")?;
        let end = if end == "WIDTH" { width } else { end.parse().ok()? };
        Some((indent, first.parse().ok()?..end, repeated))
    });
    match parts {
        None => *text += &format!("{line}\n"),
        Some((indent, range, repeated)) => {
            for number in range {
                *text += &format!("{indent}{}\n", repeated.replace('#', &number.to_string()));
            }
        }
    }
}

/// Adds a file after everything that it imports.
fn collect(variant: &Variant, file: (&'static str, &'static str), files: &mut Vec<(&'static str, &'static str)>) {
    if files.iter().any(|(name, text)| *name == file.0 && *text == file.1) {
        return;
    }
    for import in imports(file.1) {
        for needed in resolve(variant, import) {
            collect(variant, needed, files);
        }
    }
    files.push(file);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::planes::Planes;

    #[test]
    fn a_line_is_repeated_with_numbers_in_place_of_signs() {
        let repeated = |line: &str| {
            let mut text = String::new();
            repeat(line, 4, &mut text);
            text
        };
        assert_eq!(repeated("  #each 1..3 c#[#u];"), "  c1[1u];\n  c2[2u];\n");
        assert_eq!(repeated("#each 2..WIDTH #,"), "2,\n3,\n");
        assert_eq!(repeated("#each 4..WIDTH #,"), "");
        assert_eq!(repeated("  let a = 1u;"), "  let a = 1u;\n");
    }

    #[test]
    fn every_file_is_in_its_table_and_every_import_exists() {
        let stems = |dir: &str| {
            let dir = std::fs::read_dir(format!("{}/shaders/{dir}", env!("CARGO_MANIFEST_DIR"))).unwrap();
            let mut found: Vec<String> = dir
                .map(|entry| entry.unwrap().file_name().into_string().unwrap().replace(".wgsl", ""))
                .collect();
            found.sort();
            found
        };
        let named = |table: &[(&str, &str)]| table.iter().map(|(stem, _)| stem.to_string()).collect::<Vec<_>>();
        assert_eq!(stems("lib"), named(LIB));
        let mut dtype: Vec<_> = Planes::ALL.iter().flat_map(|planes| named(planes.shaders())).collect();
        dtype.sort();
        dtype.dedup();
        assert_eq!(stems("dtype"), dtype);
        let mut operators: Vec<_> = Kernel::ALL
            .iter()
            .map(|kernel| kernel.spec().name.to_string())
            .collect();
        operators.sort();
        assert_eq!(stems("op"), operators);
        for variant in Variant::all() {
            let mut files = Vec::new();
            collect(
                &variant,
                (variant.kernel.spec().name, variant.kernel.spec().text),
                &mut files,
            );
            for (name, text) in files {
                for import in imports(text) {
                    assert!(!resolve(&variant, import).is_empty(), "{name}.wgsl imports {import}");
                }
            }
        }
    }
}
