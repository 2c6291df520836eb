// The index of a workgroup in a folded grid: rows of GRID_WIDTH workgroups. One side of a grid has at most 65,535.
fn workgroup_index(workgroup: vec3<u32>) -> u32 { return workgroup.y * GRID_WIDTH + workgroup.x; }
