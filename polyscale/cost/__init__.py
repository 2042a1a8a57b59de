"""What models and operations cost: FLOPs and bytes, counted while they run or by formula."""
