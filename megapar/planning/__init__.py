"""What a configuration will take and how fast it will be, from its flags alone: no torch, no accelerator."""
