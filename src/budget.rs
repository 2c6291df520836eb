//! The memory that this machine can still allocate: the smaller of free memory and the limit of the control group.

use std::path::Path;

/// Bytes that can be allocated without swapping; `None` if the system does not report it. `root` is `/` outside of tests.
pub fn available_memory(root: &Path) -> Option<u64> {
    let text = |path: &str| std::fs::read_to_string(root.join(path)).ok();
    let number = |path: &str| text(path).and_then(|text| text.trim().parse::<u64>().ok());
    let meminfo = text("proc/meminfo")?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    let free = kib.checked_mul(1024)?;
    // Control groups, version 2 and version 1; "max" and very large numbers mean no limit.
    let groups = [
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        (
            "sys/fs/cgroup/memory/memory.limit_in_bytes",
            "sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ];
    let limits = groups
        .iter()
        .filter_map(|(limit, used)| Some(number(limit)?.saturating_sub(number(used).unwrap_or(0))));
    Some(limits.fold(free, u64::min))
}

#[cfg(all(test, feature = "tools"))]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_limit_of_a_control_group_applies() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(available_memory(root.path()), None);
        let write = |path: &str, text: &str| fs::write(root.path().join(path), text).unwrap();
        fs::create_dir_all(root.path().join("proc")).unwrap();
        fs::create_dir_all(root.path().join("sys/fs/cgroup")).unwrap();
        write("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:    4194304 kB\n");
        assert_eq!(available_memory(root.path()), Some(4 << 30));
        write("sys/fs/cgroup/memory.max", "max\n");
        assert_eq!(available_memory(root.path()), Some(4 << 30));
        write("sys/fs/cgroup/memory.max", "1073741824\n");
        write("sys/fs/cgroup/memory.current", "1048576\n");
        assert_eq!(available_memory(root.path()), Some((1 << 30) - (1 << 20)));
    }
}
