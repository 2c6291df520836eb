// Large grids are folded into rows of GRID_WIDTH workgroups, since one side holds 65,535 at most.
fn folded(group: vec3<u32>) -> u32 { return group.y * GRID_WIDTH + group.x; }
