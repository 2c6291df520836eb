//! Patterns in the names of tensors.

use crate::import::LAYER_PREFIX;

/// Whether `name` matches `glob`, in which `*` matches any number of characters, dots included, and `?` matches one.
pub(super) fn matches(glob: &str, name: &str) -> bool {
    let (glob, name): (Vec<char>, Vec<char>) = (glob.chars().collect(), name.chars().collect());
    let (mut g, mut n) = (0, 0);
    // The last star, and the first character after its current match. A mismatch extends that match by one character.
    let mut star = None;
    while n < name.len() {
        match glob.get(g) {
            Some('*') => {
                star = Some((g, n));
                g += 1;
            }
            Some(&c) if c == '?' || c == name[n] => (g, n) = (g + 1, n + 1),
            _ => match star {
                Some((at, end)) => {
                    star = Some((at, end + 1));
                    (g, n) = (at + 1, end + 1);
                }
                None => return false,
            },
        }
    }
    glob[g..].iter().all(|&c| c == '*')
}

/// The number of the network's layer that a tensor belongs to. `None` for other tensors.
pub(super) fn layer(name: &str) -> Option<usize> {
    let (number, _) = name.strip_prefix(LAYER_PREFIX)?.split_once('.')?;
    number.parse().ok()
}

/// A name with a star for every number in it. Tensors of one role share it.
pub(super) fn pattern(name: &str) -> String {
    let part = |part: &str| match !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) {
        true => "*".to_owned(),
        false => part.to_owned(),
    };
    name.split('.').map(part).collect::<Vec<_>>().join(".")
}

/// The name of an expert's matrix: the text before `experts.`, the expert's number, and the rest.
pub(super) struct Expert<'a> {
    pub before: &'a str,
    pub number: usize,
    pub role: &'a str,
}

impl<'a> Expert<'a> {
    /// `None` for a name that is not an expert's.
    pub fn of(name: &'a str) -> Option<Expert<'a>> {
        let (before, after) = name.split_once(".experts.")?;
        let (number, role) = after.split_once('.')?;
        let number = number.parse().ok()?;
        Some(Expert { before, number, role })
    }

    /// The number of the expert's layer, if the name has one.
    pub fn layer(&self) -> Option<usize> {
        let (_, after) = self.before.rsplit_once("layers.")?;
        after.split('.').next()?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs() {
        let name = "model.layers.10.mlp.down_proj.weight";
        for glob in [
            name,
            "*",
            "**",
            "model.*",
            "*.weight",
            "*down_proj*",
            "model.layers.1?.*",
            "*.mlp.*.weight",
            "*0*o*w*",
            "model.layers.10.mlp.down_proj.weight*",
        ] {
            assert!(matches(glob, name), "{glob}");
        }
        for glob in [
            "",
            "model",
            "*.weigh",
            "?",
            "model.layers.1?.mlp",
            "*up_proj*",
            "down_proj",
            "*.weight?",
            "MODEL*",
            "*.weight.*",
        ] {
            assert!(!matches(glob, name), "{glob}");
        }
        // Backtracking is linear in each star, not exponential.
        assert!(!matches(&"*a".repeat(40), &"a".repeat(39)));
        assert!(!matches(&format!("{}b", "*a".repeat(40)), &"a".repeat(2000)));
        assert!(matches("", ""));
    }

    #[test]
    fn experts_and_patterns() {
        let expert = Expert::of("skill.a.model.layers.12.mlp.experts.30.up_proj.weight").unwrap();
        assert_eq!(
            (expert.layer(), expert.number, expert.role),
            (Some(12), 30, "up_proj.weight")
        );
        assert!(Expert::of("model.layers.1.mlp.experts.gate_up_proj").is_none());
        assert!(Expert::of("model.layers.1.mlp.shared_expert.up_proj.weight").is_none());
        assert_eq!(
            pattern("model.layers.12.mlp.experts.30.up_proj.weight"),
            "model.layers.*.mlp.experts.*.up_proj.weight"
        );
    }
}
