-- As whom this session came, and whether that role may write to the record of acts: an administrator may.
select session_user::text, has_function_privilege('headwater.audit(text, text, text, jsonb)', 'execute')
