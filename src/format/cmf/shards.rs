//! Models in several files, named `{base}-{no:05}-of-{count:05}.cmf` (section 10 of the format): file names, and the checks
//! that the files belong together.

use super::file::CmfFile;
use super::header::Shard;
use crate::error::{Result, bail};
use std::path::{Path, PathBuf};

/// The most files of a model: a name has five digits for their count.
pub(super) const MAX_COUNT: u32 = 99_999;

/// All files of the model that `opened` belongs to, shard 1 first.
///
/// Errors: `ShardMismatch`, with the file, for a name that contradicts the header, a missing shard, shards of different
/// models, and sections outside shard 1; those of opening a file.
pub(super) fn with_siblings(opened: CmfFile) -> Result<Vec<CmfFile>> {
    let Some(shard) = opened.header.shard else {
        return Ok(vec![opened]);
    };
    let Shard { no, count } = shard;
    let path = opened.path().to_owned();
    let here = path.display();
    if count == 0 || count > MAX_COUNT || no == 0 || no > count {
        bail!(ShardMismatch, "{here}: the header says shard {no} of {count}");
    }
    let Some((base, named)) = name_parts(&path) else {
        if count == 1 {
            return Ok(vec![opened]);
        }
        bail!(
            ShardMismatch,
            "{here}: shard {no} of {count} must be named BASE-{no:05}-of-{count:05}.cmf"
        );
    };
    if named != shard {
        bail!(
            ShardMismatch,
            "{here}: the name says shard {} of {}, the header {no} of {count}",
            named.no,
            named.count
        );
    }
    let mut opened = Some(opened);
    let mut files: Vec<CmfFile> = Vec::new();
    for no in 1..=count {
        let file = match opened.take_if(|_| no == shard.no) {
            Some(file) => file,
            None => sibling(&path, &base, Shard { no, count })?,
        };
        if let Some(first) = files.first() {
            check_same_model(first, &file)?;
            check_bare(&file)?;
        }
        files.push(file);
    }
    Ok(files)
}

fn sibling(path: &Path, base: &str, shard: Shard) -> Result<CmfFile> {
    let path = sibling_path(path, base, shard);
    let Shard { no, count } = shard;
    // If existence cannot be determined, opening the file reports why.
    if matches!(path.try_exists(), Ok(false)) {
        bail!(ShardMismatch, "{}: shard {no} of {count} is missing", path.display());
    }
    let file = CmfFile::open(&path)?;
    if file.header.shard != Some(shard) {
        let found = file
            .header
            .shard
            .map_or("no shard".into(), |s| format!("shard {} of {}", s.no, s.count));
        bail!(
            ShardMismatch,
            "{}: expected shard {no} of {count}, the header says {found}",
            path.display()
        );
    }
    Ok(file)
}

/// All shards of a model have the same `arch`, `provenance` and `quant_type`. Shards of two models may agree in those too, so
/// `shard.set`, a hash over the whole model, is compared as well. Some writers omit it.
fn check_same_model(first: &CmfFile, file: &CmfFile) -> Result<()> {
    let files = [first, file];
    let differs = |key: &str| {
        let [a, b] = files.map(|file| file.header_json.get(key).filter(|value| !value.is_null()));
        a != b
    };
    let [a, b] = files.map(|file| file.header_json.get("shard")?.get("set").filter(|set| !set.is_null()));
    let what = ["arch", "provenance", "quant_type"]
        .into_iter()
        .find(|key| differs(key));
    let what = what.or((a.is_some() && b.is_some() && a != b).then_some("shard.set"));
    if let Some(what) = what {
        bail!(
            ShardMismatch,
            "{}: another model than {} ({what} differs)",
            file.path().display(),
            first.path().display()
        );
    }
    Ok(())
}

/// Refuses a shard other than the first that has sections or skills of the whole model.
fn check_bare(file: &CmfFile) -> Result<()> {
    let sections = &file.envelope.sections;
    let extra = [
        ("a masks section", sections.masks.is_some()),
        ("a tokenizer section", sections.vocab.is_some()),
        ("an index section", sections.index.is_some()),
        ("skills", !file.header.skills.is_empty()),
    ];
    if let Some((what, _)) = extra.iter().find(|(_, there)| *there) {
        bail!(
            ShardMismatch,
            "{}: has {what}, which only shard 1 may have",
            file.path().display()
        );
    }
    Ok(())
}

fn sibling_path(path: &Path, base: &str, shard: Shard) -> PathBuf {
    shard_path(path.parent().unwrap_or(Path::new("")), base, shard)
}

/// The path of a shard.
pub fn shard_path(dir: &Path, base: &str, Shard { no, count }: Shard) -> PathBuf {
    dir.join(format!("{base}-{no:05}-of-{count:05}.cmf"))
}

/// The base name of a model's files: the file name without its extension and without a shard number.
pub fn base_name(path: &Path) -> Option<String> {
    match name_parts(path) {
        Some((base, _)) => Some(base),
        None => Some(path.file_stem()?.to_str()?.to_owned()),
    }
}

/// Base, number and count in the name of a shard's file.
fn name_parts(path: &Path) -> Option<(String, Shard)> {
    let stem = path.file_name()?.to_str()?.strip_suffix(".cmf")?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (base, no) = rest.rsplit_once('-')?;
    let number = |digits: &str| {
        let plain = digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit());
        digits.parse().ok().filter(|_| plain)
    };
    let (no, count) = (number(no)?, number(count)?);
    Some((base.to_owned(), Shard { no, count }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_and_formatted() {
        let path = Path::new("dir/a-00002-of-00003.x..-00004-of-00012.cmf");
        let (base, shard) = name_parts(path).unwrap();
        assert_eq!(
            (base.as_str(), shard),
            ("a-00002-of-00003.x..", Shard { no: 4, count: 12 })
        );
        assert_eq!(sibling_path(path, &base, shard), path);
        for other in [
            "a.cmf",
            "a-1-of-3.cmf",
            "a-00001-of-00003.gguf",
            "a-+0001-of-00003.cmf",
            "00001-of-00003.cmf",
        ] {
            assert_eq!(name_parts(Path::new(other)), None, "{other}");
        }
    }
}
