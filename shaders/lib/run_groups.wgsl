// The bound of loops over the groups of a row.
// Needs: `batch`; params.groups.

#import tokens

// The groups of a row; 0 if the run has no tokens. The bound depends on a storage buffer for another reason: for a
// loop that depends on uniforms alone, Mesa's software Vulkan driver compiles the kernel anew at every dispatch.
fn groups_of_run() -> u32 { return params.groups * min(batch.count, 1u); }
